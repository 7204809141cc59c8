"""shell: the memory behind the books of headroom (H2): chunks taken from the device and given back to it.

``tend`` runs once a step, after it landed: gives closed chunks back as soon as they are cold, looks at the device's
free memory every few steps, and then closes chunks or takes one. Nothing is taken or given back anywhere else.
"""

from __future__ import annotations

import torch

from common import limits, log
from common.config import GIB, EngineSettings
from worker.engine.device import Device, DeviceError
from worker.engine.device_pool import Rows
from worker.engine.fit import Fit
from worker.engine.geometry import Geometry
from worker.engine.headroom import Headroom
from worker.engine.headroom_fit import change, chunks_at_start


class HeadroomMemory:
    """``most`` chunks at most, all of them taken at once by ``fill``. One thread, the engine's."""

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        page_rows: int,
        dtype: torch.dtype,
        chunk_bytes: int = limits.HEADROOM_CHUNK_BYTES,
        *,
        most: int = 0,
        reserve_bytes: int = 0,
    ) -> None:
        pages = chunk_bytes // (page_rows * geometry.token_bytes)
        self.books = Headroom(page_rows, pages)
        self.most = most
        self.reserve_bytes = reserve_bytes
        self._device = device
        self._shape = (2, geometry.layers, pages * page_rows, geometry.kv_heads, geometry.head_dim)
        self._dtype = dtype
        self._chunks: dict[int, tuple[torch.Tensor, tuple[Rows, ...]]] = {}
        self._calls = self._quiet = self._asked = 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk as it is allocated: whole pages of all layers."""
        return self._dtype.itemsize * torch.Size(self._shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks in use."""
        return self.books.chunks * self.chunk_bytes

    def rows(self, chunk: int, layer: int) -> Rows:
        """K and V (rows, kv heads, head dim) of one layer in one chunk."""
        return self._chunks[chunk][1][layer]

    def fill(self, step: int = 0) -> None:
        """Take all chunks there may be. ``DeviceError`` when one is not to be had."""
        while self.books.chunks < self.most:
            self._take(step)

    def revoke(self, chunks: int) -> None:
        """Give so many chunks back from the next step boundary on."""
        self._asked += chunks

    def tend(self, step: int, *, idle: bool) -> int:
        """At a step boundary; ``step`` is the next to be planned. ``idle``: none is planned or under way. The bytes of
        the chunks in use."""
        if not self.most:
            return 0
        if idle:
            self.books.vacate(step)
        for chunk in self.books.cold(step):
            tensor, _ = self._chunks.pop(chunk)
            self._device.free_chunk(tensor)
        if self._asked:
            self._quiet = limits.HEADROOM_QUIET_LOOKS_COUNT
            self.books.revoke(self._asked, step)
            self._asked = 0
        self._calls += 1
        if self._calls % limits.HEADROOM_LOOK_STEPS_COUNT == 0:
            self._look(step)
        return self.nbytes

    def figures(self) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        """Bytes that hold history, bytes there are, pages moved by cause; any thread may ask."""
        books = self.books
        page = self.chunk_bytes // max(1, books.chunk_pages)
        moved = tuple((cause.value, pages) for cause, pages in books.moved.copy().items())
        return books.held * page, self.nbytes, moved

    def close(self) -> None:
        """Give everything back: only once the device is proved done with it (L7)."""
        for tensor, _ in self._chunks.values():
            self._device.free_chunk(tensor)
        self._chunks.clear()

    def _look(self, step: int) -> None:
        books, free = self.books, self._device.free_bytes()
        self._quiet -= 1
        turn = change(
            free, self.reserve_bytes, self.chunk_bytes, books.chunks, books.closing, self.most, self._quiet
        )  # fmt: skip
        if turn < 0:
            self._quiet = limits.HEADROOM_QUIET_LOOKS_COUNT
            books.revoke(-turn, step)
        elif turn > 0:
            try:
                self._take(step)
            except DeviceError:  # somebody was faster: there is a next look
                self._quiet = limits.HEADROOM_QUIET_LOOKS_COUNT

    def _take(self, step: int) -> None:
        tensor = self._device.allocate_chunk(self._shape, self._dtype)
        layers = tuple(Rows(key, value) for key, value in zip(tensor[0], tensor[1], strict=True))
        self._chunks[self.books.open(step)] = (tensor, layers)


def warm_headroom(
    device: Device,
    geometry: Geometry,
    fit: Fit,
    settings: EngineSettings,
    dtype: torch.dtype,
) -> HeadroomMemory:
    """After warm-up: what the settings ask for and the device has free, taken, its arithmetic logged. ``RefusedError``
    naming the setting when it is not there."""
    memory = HeadroomMemory(
        device, geometry, fit.page_rows, dtype, reserve_bytes=int(settings.headroom_reserve_gib * GIB)
    )
    if settings.headroom_gib != "0":
        pages_of_all = fit.useful_rows // fit.page_rows
        memory.most, words = chunks_at_start(
            settings, device.free_bytes(), limits.HEADROOM_CHUNK_BYTES, memory.books.chunk_pages, pages_of_all
        )
        log.get("engine").info("headroom", formula=[words])
        memory.fill()
    return memory
