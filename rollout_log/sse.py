"""From bytes to server-sent event frames, without IO.

Follows the WHATWG specification for what a frame is, with bytes where it has characters: CR, LF and
CRLF end a line, a CR at once (an LF right after it is swallowed when it comes); comments and fields
other than `data` say nothing; a byte order mark is skipped at the very start. A line may be as long
as it likes, and U+2028 or U+0085 inside one are just text.

One thing differs: a block whose data is empty (`data` alone) is no frame, because it tells a decoder
nothing. Its bytes are kept like those of a comment.

No byte is lost: the frames' `wire` bytes and `tail()` joined are the input, and frames are the same
however the input was cut into chunks.
"""

from __future__ import annotations

import re

import msgspec

__all__ = ["FrameSplitter", "SSEFrame"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LF = 0x0A
_CR = 0x0D
_find_line_end = re.compile(rb"[\r\n]").search


class SSEFrame(msgspec.Struct, frozen=True, gc=False):
    """One data frame."""

    data: bytes
    """The values of its `data` lines, joined by LF."""
    raw: bytes | None = None
    """All bytes since the end of the frame before; None where they are `data: <data>\\n\\n`."""

    @property
    def wire(self) -> bytes:
        """The bytes since the end of the frame before, this frame's included."""
        return b"data: %b\n\n" % self.data if self.raw is None else self.raw


class FrameSplitter:
    """Splits one response body, fed in chunks of any size, into frames.

    Frames of the usual form `data: …\\n\\n` cost one `bytes.find` each. Anything else (a CR, a comment,
    another field, several data lines) is read line by line, until a chunk ends between two frames or
    in the first line of one. Either way each byte is looked at a bounded number of times.
    """

    def __init__(self) -> None:
        self._pending = bytearray()  # since the end of the last frame
        self._at_start = True  # no line has ended yet
        # Not by line: `_pending` has no CR, and an LF only as its last byte.
        self._by_line = False
        self._line = 0  # where in `_pending` the unfinished line begins
        self._scanned = 0  # no line ends in `_pending` between `_line` and here
        self._after_cr = False  # an LF that comes next is swallowed
        self._values: list[bytes] = []  # of the unfinished frame's data lines

    def feed(self, chunk: bytes) -> list[SSEFrame]:
        """Take the next bytes and return the frames that end in them."""
        if self._by_line or chunk.find(b"\r") >= 0:
            return self._feed_lines(chunk)
        if self._pending:
            if chunk.find(b"\n") < 0:
                self._pending += chunk
                return []
            chunk = b"".join((self._pending, chunk))
            self._pending.clear()
        frames: list[SSEFrame] = []
        start = 0
        more = chunk.startswith(b"data: ")
        while more:
            end = chunk.find(b"\n", start + 6)
            more = chunk.startswith(b"\n\ndata: ", end)
            if end == start + 6 or not (more or chunk.startswith(b"\n\n", end)):
                break
            frames.append(SSEFrame(chunk[start + 6 : end]))
            start = end + 2
        if frames:
            self._at_start = False
        if start < len(chunk):
            rest = chunk[start:]
            if rest.find(b"\n", 0, -1) >= 0:
                return frames + self._feed_lines(rest)
            self._pending += rest
        return frames

    def only_frame(self, chunk: bytes) -> bytes | None:
        """Return the data of a chunk that is one frame of the usual form, between two others.

        None, and nothing is taken, where it is anything else; `feed` takes all there is.
        """
        if self._pending or self._by_line or not (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n", 7)):
            return None
        if chunk.find(b"\n") != len(chunk) - 2 or chunk.find(b"\r") >= 0:
            return None
        self._at_start = False
        return chunk[6:-2]

    def tail(self) -> bytes:
        """Return the bytes after the last whole frame.

        After CRLF line ends that is at least the LF of the last one, as the CR had ended the frame.
        """
        return bytes(self._pending)

    def _feed_lines(self, chunk: bytes) -> list[SSEFrame]:
        frames: list[SSEFrame] = []
        pending = self._pending
        pending += chunk
        block, line, scanned = 0, self._line, self._scanned
        while line < len(pending):
            if self._after_cr:
                self._after_cr = False
                if pending[line] == _LF:
                    line += 1
                    continue
            found = _find_line_end(pending, max(line, scanned))
            if found is None:
                break
            end = found.start()
            content = bytes(memoryview(pending)[line:end])
            line = end + 1
            self._after_cr = pending[end] == _CR
            if self._end_line(content):
                frames.append(self._end_frame(bytes(memoryview(pending)[block:line])))
                block = line
        del pending[:block]
        self._line = line - block
        self._scanned = len(pending)
        self._by_line = self._line > 0 or self._after_cr
        if not self._by_line:
            self._scanned = 0
        return frames

    def _end_line(self, line: bytes) -> bool:
        """Take one line without its end; True when it ends a frame."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if len(self._values) > 1 or (self._values and self._values[0]):
                return True
            self._values.clear()
        elif line.startswith(b"data:"):
            self._values.append(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif line == b"data":
            self._values.append(b"")
        return False

    def _end_frame(self, wire: bytes) -> SSEFrame:
        frame = SSEFrame(b"\n".join(self._values))
        self._values.clear()
        return frame if frame.wire == wire else SSEFrame(frame.data, wire)
