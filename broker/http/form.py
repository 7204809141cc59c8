"""rules: an upload's form (multipart/form-data) as it comes, a piece at a time: its fields, its file's bytes onwards.

Nothing of the file is held: what ``feed`` returns is to be written before the next piece is fed.
"""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from broker.http.faults import ApiFault, bad
from common import limits

FIELDS = ("purpose", "file")


class Form:
    """One form. ``max_bytes`` is the most its file may have."""

    def __init__(self, content_type: str, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
            raise bad("file", "send the file as multipart/form-data, with a boundary", "invalid_content_type")
        self.filename = ""
        self.size = 0
        """Bytes of the file so far."""
        self.ended = False
        self._max_bytes = max_bytes
        self._fields: dict[str, bytearray] = {}
        self._beside = 0
        self._name = ""
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._file: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins, "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value, "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end, "on_part_data": self._on_data, "on_end": self._on_end,
            },
        )  # fmt: skip

    def feed(self, data: bytes) -> bytes:
        """Take the next piece; what of it belongs to the file. Raises ``ApiFault`` for no form, or too large a one."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(str(error)) from error
        found, self._file = b"".join(self._file), []
        return found

    def end(self) -> None:
        """The body is over. Raises ``ApiFault`` unless the form is whole and asks for what we keep."""
        if not self.ended:
            raise _broken("it ends before its last boundary")
        if "purpose" not in self._fields:
            raise bad("purpose", "purpose is missing", "missing_required_parameter")
        if "file" not in self._fields:
            raise bad("file", "file is missing", "missing_required_parameter")
        if self._fields["purpose"] != b"batch":
            purpose = bytes(self._fields["purpose"]).decode(errors="replace")[:40]
            raise bad("purpose", f"purpose must be 'batch' here, not {purpose!r}")
        if self.size == 0:
            raise ApiFault(400, "empty_file", "the file holds no line; put one request on each line", "file")

    # -- what the parser finds ----------------------------------------------------------------------------------------

    def _part_begins(self) -> None:
        self._name, self._disposition = "", b""

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._count(end - start)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._count(end - start)

    def _header_ends(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name not in FIELDS:
            name = self._name[:80]
            raise bad(name, f"the field {name!r} is not supported here: leave it out", "unsupported_parameter")
        if self._name in self._fields:
            raise bad(self._name, f"{self._name} is there twice")
        self._fields[self._name] = bytearray()
        if self._name == "file":
            given = options.get(b"filename", b"").decode(errors="replace").replace("\\", "/").rpartition("/")[2]
            self.filename = given[: limits.HTTP_FILE_NAME_MAX_CHARS] or "upload.jsonl"

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.size += end - start
            if self.size > self._max_bytes:
                raise too_large(self._max_bytes)
            self._file.append(data[start:end])
        else:
            self._count(end - start)
            self._fields[self._name] += data[start:end]

    def _on_end(self) -> None:
        self.ended = True

    def _count(self, size: int) -> None:
        self._beside += size
        if self._beside > limits.HTTP_FORM_MAX_BYTES:
            raise bad("file", f"the form has more than {limits.HTTP_FORM_MAX_BYTES} bytes beside its file")


def too_large(most: int) -> ApiFault:
    """413: the file has more than ``most`` bytes."""
    words = f"the file has more than {most} bytes, the most that is taken here (--http-upload-mib); split it"
    return ApiFault(413, "file_too_large", words, "file")


def _broken(words: str) -> ApiFault:
    return ApiFault(400, "invalid_multipart", f"the upload is no whole form: {words}; send it again", "file")
