"""Documents of a stream, kept on disk while a store is prepared, so that the passes after the first don't download them again."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from lm.errors import DataError, one_line

_LENGTH = struct.Struct("<q")  # bytes of the document that follows


class Restart(DataError):
    """What an interrupted preparation kept can't be continued; it is deleted, and the next call starts again."""


def spooled(texts: Iterator[tuple[str, int, int]], path: Path) -> Iterator[tuple[str, int, int]]:
    """The items of `texts`, whose first fields are written to `path` (compressed), which appears when the last was given."""
    import pyarrow

    temporary = path.with_name(f"{path.name}.new")
    with pyarrow.OSFile(os.fsencode(temporary), "wb") as raw, pyarrow.CompressedOutputStream(raw, "zstd") as file:
        for item in texts:
            content = item[0].encode()
            file.write(_LENGTH.pack(len(content)))
            file.write(content)
            del content  # a long document is in memory once
            yield item
    os.replace(temporary, path)


def read_spool(path: Path) -> Iterator[str]:
    """The texts that `spooled` wrote. Raises Restart if the file is damaged."""
    import pyarrow

    try:
        with pyarrow.OSFile(os.fsencode(path)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as file:
            while head := file.read(_LENGTH.size):
                (size,) = _LENGTH.unpack(head)
                yield file.read(size).decode()
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError, ValueError, OverflowError, struct.error) as error:
        raise Restart(f"{path}: can't be read (damaged?): {one_line(error)}; run again") from None
