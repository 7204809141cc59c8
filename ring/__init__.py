"""values: the pinned hot ring between a worker's session and its engine (R1-R6). Imports neither torch nor CUDA.

``descriptor`` and ``accounting`` are pure; ``memory`` and ``cuda_memory`` hold the pages; ``producer`` is the session's
side, ``consumer`` the engine's, ``handover`` what the two threads share on the host.
"""
