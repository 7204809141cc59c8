"""values: every bound of haulier in one place: unit last in its name, the reason beside it, relations checked.

Nothing here is tunable at run time; what an operator may set lives in ``common.config``.
"""

from __future__ import annotations

from common.errors import InvariantError

# -- protocol ---------------------------------------------------------------------------------------------------
SCHEMA_VERSION = 1
"""What both sides must speak to exchange work."""
MESSAGE_MAX_BYTES = 4 * 1024 * 1024
"""Largest frame on a socket (ZMQ_MAXMSGSIZE): all we send is far below, and a peer cannot make us allocate more."""
PART_MAX_BYTES = 1024 * 1024
"""Results, chunks and bodies beyond this travel in parts, so that beats are never stuck behind one."""
PARTS_UNCONFIRMED_MAX_COUNT = 2
"""Parts of one result on their way at once: enough to fill a link, few enough to let beats through."""
TEXT_MAX_CHARS = 512
"""Any name, custom_id or reason in a message."""
REASON_MAX_CHARS = 4096
"""An explanation in words."""
NOTES_MAX_COUNT = 25
"""Short texts that an engine leaves about one line, for ``haulier explain``; older ones stay, the rest is counted."""
NOTE_MAX_CHARS = 160
NOTES_MAX_CHARS = NOTES_MAX_COUNT * (NOTE_MAX_CHARS + 1)
"""All of one line's, each on a line of its own."""
PAGE_MAX_COUNT = 2048
"""Items of one list in one message; longer lists travel in pages."""
BATCH_MAX_LINES = 256
"""Lines of one assignment."""
BATCH_MAX_BYTES = 2 * 1024 * 1024
"""Bodies of one assignment; a single larger body travels alone, in parts."""
BODY_PARTS_A_BEAT_COUNT = 32
"""Parts of long bodies sent to one worker in one beat (32 MiB/s): its queue never fills up, so beats get through."""
HELD_MAX_COUNT = 262_144
"""Lines one worker may list when it logs in: far above any credit, and a peer cannot make us hold more."""
RESULTS_OPEN_MAX_BYTES = 2 * 64 * 1024 * 1024
"""Long results of one session that have begun to come and are not whole: two of the longest."""
MESSAGES_A_TURN_COUNT = 1024
"""Messages the broker takes in one turn: one commit covers them all, and beats are never late."""
MESSAGES_A_TURN_BYTES = 32 * 1024 * 1024
FETCH_MAX_BYTES = 1024 * 1024
"""Output lines in one answer to a client, unless one line alone is longer."""

# -- time -------------------------------------------------------------------------------------------------------
BEAT_S = 1.0
"""Both sides beat this often."""
LIVENESS_S = 5.0
"""Silence after which a session is gone (S2): five beats."""
LOADING_LIVENESS_S = 120.0
"""The same while a worker loads its model: some loaders hold the interpreter lock for long."""
GRACE_S = 30.0
"""After a broker's restart, assigned lines wait this long for the worker that holds them to claim them (D3)."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_EARLY_S = 0.5
"""A worker's longest pause between logins in the first minute: many tries fit into one grace."""
BACKOFF_MAX_S = 5.0
BACKOFF_EARLY_S = 60.0
CONNECT_S = 1.0
"""The first try to reach an endpoint may take this long, doubled with each round over all of them up to HANDSHAKE_S: a
name that does not resolve says nothing, and the next endpoint may be the one that took over."""
HANDSHAKE_S = 5.0
"""A wrong key is reported on both sides within this time."""
STALL_S = 120.0
"""Work held and no engine progress (a step, a layer, a token) for this long: the worker's process ends itself."""
CLOCK_JUMP_S = 60.0
"""Wall and monotonic clock that part by so much: the wall clock was set, or the machine slept; deadlines go with it."""
DRAIN_S = 60.0
"""A draining worker finishes what it can in this time and hands the rest back."""
PARENT_GRACE_S = 5.0
"""A process started by ``haulier run`` has this long to leave in good order once its parent is gone."""

GARBAGE_YOUNG_COUNT = 20_000
"""New containers after which the interpreter looks for cycles: a few looks a second at ten thousand lines a second."""

# -- files ------------------------------------------------------------------------------------------------------
LINE_MAX_BYTES = 64 * 1024 * 1024
"""One line of an input file."""
CUSTOM_ID_MAX_CHARS = 512
PROBLEMS_LISTED_MAX_COUNT = 10_000
"""Bad lines kept one by one of one file; beyond it only their count."""
VALIDATE_LINES_A_TURN = 2_000
"""Lines checked in one turn of the broker, so that beats go on while a large file is read."""
VALIDATE_BYTES_A_TURN = 8 * 1024 * 1024
"""The same in bytes; one longer line is still read in one turn."""
MODELS_A_JOB_MAX_COUNT = 64
"""Different models one input file may name: each has its own waiting window."""

# -- store ------------------------------------------------------------------------------------------------------
WAITING_LOADED_MAX_COUNT = 4_096
"""Waiting lines of one job held in memory; the rest stays in the store, so that memory is flat."""
WAITING_LOADED_MIN_COUNT = 256
"""The smallest such window, when many jobs share the memory."""
KEYS_A_SESSION_MAX_COUNT = 64
"""Beginnings of lines that are remembered of one session: more than an engine holds histories."""
KEYS_SEARCHED_MAX_COUNT = 64
"""Beginnings looked at for one line, when the first line of a window is another worker's by its beginning."""
PASSED_OVER_MAX_COUNT = 512
"""Lines of a window given out before its first one; then it goes to whoever asks."""
TOKEN_GUESS_BYTES = 4
"""A guess of what a token is in a request's body, until its result tells: for fair shares alone."""
END_LINES_A_TURN = 2_000
"""Waiting lines of a cancelled or expired job that get their error line in one turn of the broker."""
DELETE_ROWS_A_TURN = 2_000
"""Rows of deleted jobs that go in one turn, so that beats go on while a job of millions is deleted."""
DELETE_BYTES_A_TURN = 16 * 1024 * 1024
"""The same in bytes of results; one longer result still goes in one turn."""
HISTORY_KEPT_MAX_COUNT = 100_000
"""Newest entries of the history among which those that belong to no job (logins, sessions gone) are kept."""
RETENTION_LOOK_S = 60.0
"""Between two looks for jobs that are kept no longer."""
TIDY_AFTER_S = 1.0
"""A store that nobody has asked anything for so long is vacuumed and its log folded into the file."""
VACUUM_PAGES_A_TURN = 256
"""Free pages given back to the file system in one turn: 1 MiB."""
QUESTIONS_MAX_COUNT = 64
"""Long questions (audits) that wait for one reader; who asks more is told to ask again."""
STORE_BUSY_MS = 5_000
"""How long SQLite waits for another connection's lock before it says so."""
WORKERS_KNOWN_MAX_COUNT = 10_000
"""Workers whose last login is remembered; each container that comes under a new name is one more."""
WORKERS_SHOWN_MAX_COUNT = 1_000
"""Workers that are gone and still shown in the metrics, as 0."""
MODEL_LISTS_KEPT_MAX_COUNT = 256
"""Jobs whose models' names are kept in memory; of others they are read again."""
UPLOAD_PATIENCE_S = 24 * 3600.0
"""An input of which nothing more came for so long is given up: the disk it was promised is others' again."""
DEATHS_ALONE_MAX_COUNT = 2
"""Deaths while running alone before a line is set aside (D5)."""

# -- http -------------------------------------------------------------------------------------------------------
HTTP_REQUESTS_MAX_COUNT = 128
"""Requests under way at once; who comes beyond is told to come again."""
HTTP_TENANT_REQUESTS_MAX_COUNT = 32
"""Those of one tenant: slow readers of one keep nobody else out."""
HTTP_CONNECTIONS_MAX_COUNT = 512
HTTP_THREADS_COUNT = 8
"""Threads that look at files and ask the broker for requests."""
HTTP_CARRIERS_COUNT = 4
"""Batches handed over to the broker, or ended, at once."""
HTTP_CLIENTS_A_THREAD_COUNT = 4
"""Tenants whose connection to the broker a thread keeps."""
HTTP_ANSWER_S = 15.0
"""The broker has this long to answer before the request is told that it does not."""
HTTP_SILENCE_S = 120.0
"""A client that sends nothing of its request, or takes nothing of its answer, for so long is let go."""
HTTP_BODY_MAX_BYTES = 1024 * 1024
"""A request that is no upload."""
HTTP_FORM_MAX_BYTES = 64 * 1024
"""What an upload may have beside its file."""
HTTP_DRAIN_MAX_BYTES = 64 * 1024 * 1024
"""Read and thrown away of a request that is refused: most clients read no answer before they have sent all."""
HTTP_DRAIN_S = 10.0
"""The same in time."""
HTTP_HEAD_S = 15.0
"""A connection that has sent no whole head of a request for so long is closed: idle ones keep nobody else out."""
HTTP_FILE_NAME_MAX_CHARS = 255
HTTP_METADATA_MAX_COUNT = 16
HTTP_METADATA_NAME_MAX_CHARS = 64
HTTP_ERRORS_MAX_COUNT = 1_000
"""Bad lines listed in a batch; haulier status lists all."""
HTTP_WINDOW_MAX_S = 30 * 24 * 3600
HTTP_LOOK_S = 1.0
"""Between two looks at open batches; more when there are many: at most so many looks a second."""
HTTP_LOOKS_A_SECOND_MAX_COUNT = 20
HTTP_VISIT_S = 12 * 3600.0
"""How long who logged in at the page may look at it."""
HTTP_VISITS_MAX_COUNT = 1_000
HTTP_KEY_MAX_CHARS = 512
"""Of what is typed into the login form."""
HTTP_REFRESH_S = 5
"""Between two looks of an open page."""
HTTP_STOP_S = 2.0
"""What requests under way get to end when the server stops: well within the grace of a process without its parent."""

# -- worker -----------------------------------------------------------------------------------------------------
PREFETCH_MIN_LINES = 4
"""Lines a worker takes beyond those its engine runs, or a quarter of them if that is more: enough to hide one round
trip and tokenizing, few enough that the end of a job is not stuck behind one worker."""
RESULTS_UNCONFIRMED_MAX_BYTES = PARTS_UNCONFIRMED_MAX_COUNT * PART_MAX_BYTES
"""Results on their way and not acknowledged, long and short together: a beat waits behind no more than this."""
RESULTS_UNCONFIRMED_MAX_LINES = 4_096
OUTBOX_MAX_LINES = 200_000
OUTBOX_MAX_BYTES = 8 * 1024 * 1024 * 1024
"""A fuller outbox grants no credit: the broker has been away, or refuses to take, for long."""
OUTBOX_CACHE_MAX_BYTES = 32 * 1024 * 1024
"""Freshly stored results kept in memory, so that delivering them need not read them back."""
OUTBOX_RETRY_S = 1.0
"""Pause before a commit that failed (disk full) is tried again."""
TOKENIZE_MAX_LINES = 64
"""Lines given to the tokenizer in one call: it gives the interpreter lock away for the call's length."""
RING_BURST_MAX_COUNT = 32
"""Entries published under one doorbell."""
SAY_AGAIN_S = 10.0
"""Logins that fail for one and the same reason are reported this often."""
CLOSE_LINGER_MS = 1_000
"""What a worker that says BYE gives its last frames to leave; every other close drops them."""

# -- ring -------------------------------------------------------------------------------------------------------
DESCRIPTOR_BYTES = 64
PAYLOAD_ALIGN_BYTES = 64
RING_ENTRIES_COUNT = 1024
"""Descriptors in the table; a power of two."""
RING_BYTES = 64 * 1024 * 1024
"""Default payload arena: 16 Mi token ids, 16 requests of a million tokens."""
RING_STUCK_S = 5.0
"""Full with nothing in it (R6) for this long is a finding: a result on its way passes in milliseconds."""

# -- engine -----------------------------------------------------------------------------------------------------
SIZE_MAX_BYTES = 1 << 50
"""No machine has more than 1 PiB: a size beyond it is a slip of the pen."""
ENGINE_MAX_COUNT = 1 << 30
"""Contexts, histories, pages or tokens of one setting: more is a slip of the pen as well."""
CONTEXT_TOKENS = 2048
"""Default longest prompt and answer together."""
PAGE_TOKENS = 256
"""Default tokens of one page: few large copies, little waste for long histories."""
PREFILL_CHUNK_TOKENS = 2048
"""Default new rows of one step: prompts longer than this are prefilled over several steps."""
DRAFT_MAX_TOKENS = 64
"""More tokens drafted at once are hardly ever all right, and each is a row of the step."""
PREFIX_JOBS_MAX_COUNT = 16
"""Jobs whose prompts a worker compares with later ones (H5)."""
PREFIX_PROMPTS_MAX_COUNT = 8
"""Prompts kept of each: enough that questions on a few documents, one a batch, find each other."""
PREFIXES_MAX_COUNT = 32
"""Shared beginnings known of each."""
PREFIXES_MAX_BYTES = 64 * 1024 * 1024
"""Token ids kept for that: some fifteen prompts of a million tokens."""
STOP_STRINGS_MAX_COUNT = 16
STOP_IDS_MAX_COUNT = 64
EMBEDDING_INPUTS_MAX_COUNT = 2048
"""Inputs of one line; the service's own bound."""
TOOLS_MAX_COUNT = 128
CHOICES_MAX_COUNT = 128
"""Tools offered to one chat; answers to one line, ``n``: the service's own bounds."""
TOP_LOGPROBS_MAX_COUNT = 20
COMPLETION_LOGPROBS_MAX_COUNT = 5
"""Likeliest tokens told beside each of a chat's, and of a completion's; the service's own bounds."""
LOGIT_BIAS_MAX_COUNT = 1024
"""Tokens one request may name: 12 KiB on the device for each request that runs."""
STEP_TABLES_COUNT = 3
"""Rotating host tables: the host runs at most one step ahead, so the third is never read by a copy in flight."""

EVENTS_COUNT = 2048
"""Device events of one engine: five a staged layer, two steps in flight, 128 dense layers, and room for retirement."""
FAIR_WAIT_S = 20.0
"""A parked context runs again within so long, at the rates believed: turns are far longer than bringing one in (2 GB
are 40 ms), and a request is seen to move."""
QUANTUM_MIN_STEPS_COUNT = 8
"""A turn is never shorter: several tokens for each bringing in, even where a step takes seconds."""
DECISIONS_KEPT_MAX_COUNT = 65_536
"""Newest decisions about device pages that are kept to be explained: a few MB."""
HEADROOM_CHUNK_BYTES = 1 << 30
"""Headroom is taken from the device, and given back, in pieces of this size (H2)."""
HEADROOM_RESERVE_BYTES = 2 << 30
"""Default device memory that headroom leaves free: long prompts take more for a while than the warm-up did."""
HEADROOM_LOOK_STEPS_COUNT = 16
"""The device is asked for its free memory once in so many steps: asking costs host time."""
HEADROOM_QUIET_LOOKS_COUNT = 32
"""After a chunk was given back none is taken for so many looks: memory that comes and goes moves no pages."""
PASSED_BY_MAX_COUNT = 64
"""Requests that pass a head of the queue which waits for a whole segment, before it goes first whatever is free."""
RANKS_MAX_COUNT = 64
"""Devices that one model is spread over: more than one machine has."""
RANKS_LOADED_S = 7200.0
"""A rank waits so long for another that still loads: of large weights, a slow disk's worth. One that ends is seen at
once, and one that stops at work is found by the stall watch."""
RANK_WORDS_S = 2.0
"""What a rank that ended gets to say why, before the others say that it ended."""
STAGING_SLOTS_MIN_COUNT = 2
"""While one slot is attended, the next layer is copied into another."""
RETIRE_DEADLINE_S = 120.0
"""A sealed stage whose events are not over by then: the transport has failed (L4)."""
QUARANTINE_DEADLINE_S = 30.0
"""How long quarantine waits for proof that the device is done before it retains all and the process ends (L6)."""

STEPS_REPORTED_MAX_COUNT = 4096
"""Step times kept until they are exported: half a second of the shortest steps, many times."""
STEP_DEADLINE_S = 80.0
"""A step that is not over by then never will be: 2 TB of history at 50 GB/s, the most that one can stage, are 40 s."""
ENGINE_POLL_MIN_S = 0.00005
ENGINE_POLL_MAX_S = 0.001
"""The host looks for a step's end this often: well below a step, and asleep between, so that the session runs."""
LINK_MEASURED_BYTES = 1 << 30
"""The link is measured at start with so many bytes, three times: some tens of milliseconds of it."""
ARENA_VIEWS_MAX_COUNT = 1 << 16
"""Pages of the device page pool whose views are kept for the next step: making one costs host time, as a copy does."""
BLOCK_STEP_TOKENS = 1024
"""Blocks of long prompts, and chunks that have them, end at multiples of so many rows: the kernel for them is prepared
once a shape, which takes 45 ms."""
BLOCK_MIN_TOKENS = 2 * BLOCK_STEP_TOKENS
"""Shorter chunks are attended with all other prompts: two calls and a join would save nothing."""
WRITE_BACK_COPY_MIN_TOKENS = 512
"""New rows of a context from which on they go to the host as one copy a layer; fewer are scattered with others'."""
GRAPHS_MAX_COUNT = 128
"""Captured decode steps kept, one a shape: the one used longest ago goes first."""
GRAPH_HISTORY_MIN_TOKENS = 2048
"""Shorter histories all count as so long: their attention takes no time that a closer shape could save."""
ENGINE_IDLE_S = 0.5
"""An idle engine sleeps on the ring's condition at most this long before it looks whether to stop."""


def check() -> None:
    """Raise ``InvariantError`` unless the bounds agree with each other."""
    relations = {
        "several beats fit into one liveness": LIVENESS_S >= 3 * BEAT_S,
        "loading is not stricter than running": LOADING_LIVENESS_S >= LIVENESS_S,
        "many logins fit into one grace": GRACE_S >= 10 * BACKOFF_MAX_EARLY_S,
        "a grace outlasts one liveness and one login": GRACE_S >= 2 * LIVENESS_S + BACKOFF_MAX_EARLY_S,
        "a part fits into a message": PART_MAX_BYTES * 2 <= MESSAGE_MAX_BYTES,
        "a batch fits into a message": BATCH_MAX_BYTES * 3 // 2 <= MESSAGE_MAX_BYTES,
        "a batch's results fit into a message with their notes": BATCH_MAX_BYTES * 3 // 2
        + BATCH_MAX_LINES * NOTES_MAX_CHARS
        <= MESSAGE_MAX_BYTES,
        "descriptors are a power of two": RING_ENTRIES_COUNT & (RING_ENTRIES_COUNT - 1) == 0,
        "http requests end before the grace without a parent": HTTP_STOP_S < PARENT_GRACE_S,
        "events for two steps of 128 layers in flight": EVENTS_COUNT >= 2 * 5 * 128,
        "an engine that is stuck says so before its worker is stalled": STEP_DEADLINE_S + QUARANTINE_DEADLINE_S
        < STALL_S,
        "three step tables cover one step ahead": STEP_TABLES_COUNT >= 3,
    }
    broken = [words for words, holds in relations.items() if not holds]
    if broken:
        raise InvariantError("limits disagree: " + "; ".join(broken))


check()
