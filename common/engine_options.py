"""values: options of an engine that several commands have: what is kept on the device beside staging (H1,
H2), what requests share (H5), drafts, and how many devices it is spread over.

``haulier worker`` and ``haulier run`` declare their parameters with these; defaults are those of ``EngineSettings``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from common.config import EngineSettings

DEFAULTS = EngineSettings(model="any")

Retain = Annotated[
    str,
    typer.Option(
        "--retain",
        envvar="HAULIER_RETAIN",
        help="History in device pages: on: what the slots leave; whole: all of it, or a request waits; off.",
    ),
]
TargetPages = Annotated[
    int,
    typer.Option(
        "--target-pages", envvar="HAULIER_TARGET_PAGES", help="Device pages of a request by right; 0: equal shares."
    ),
]
BurstPages = Annotated[
    int,
    typer.Option(
        "--burst-pages", envvar="HAULIER_BURST_PAGES", help="Pages it may borrow while free; 0: whatever is free."
    ),
]
HeadroomGib = Annotated[
    str,
    typer.Option(
        "--headroom-gib",
        envvar="HAULIER_HEADROOM_GIB",
        help="Most free device memory, whole GiB, that keeps history until it is needed; auto: all of it, 0: none.",
    ),
]
HeadroomReserveGib = Annotated[
    float,
    typer.Option(
        "--headroom-reserve-gib",
        envvar="HAULIER_HEADROOM_RESERVE_GIB",
        help="Device memory that headroom leaves free, GiB.",
    ),
]
OwnTokens = Annotated[
    int,
    typer.Option(
        "--own-tokens",
        envvar="HAULIER_OWN_TOKENS",
        help="Room for the own part of who shares a history: question, answer and up to a page; 0: a whole one.",
    ),
]
SharedHistories = Annotated[
    int,
    typer.Option(
        "--shared-histories",
        envvar="HAULIER_SHARED_HISTORIES",
        help="Histories that several requests share, held beside theirs; 0: none, -1: as many as fit.",
    ),
]
Graphs = Annotated[
    str,
    typer.Option(
        "--graphs",
        envvar="HAULIER_GRAPHS",
        help="Replay decode steps whose history is on the device as graphs: auto (on a GPU), on, off.",
    ),
]
DraftTokens = Annotated[
    int,
    typer.Option(
        "--draft-tokens",
        envvar="HAULIER_DRAFT_TOKENS",
        help="Tokens looked up in the request's own text and verified in one pass; 0: none.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        envvar="HAULIER_TENSOR_PARALLEL",
        help="Spread the model over so many devices, from --device on; pools are each one's.",
    ),
]
