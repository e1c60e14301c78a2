# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Writes a wheel, copying upstream's compressed files as they are.

The compiled files are 400 MB; zipfile would inflate and deflate them again, which
takes most of a minute. A wheel needs only the plain zip format: no encryption,
no archive beyond 4 GiB.
"""

import base64
import csv
import hashlib
import io
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_MODE = 0o100644 << 16
_DATE = (1 << 5) | 1  # 1980-01-01, so that equal input gives an equal wheel
_UTF8 = 0x800


def record_hash(data: bytes) -> str:
    """A file's hash as RECORD writes it."""
    digest = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class WheelWriter:
    """A wheel in the making; RECORD is written when the `with` block ends well.

    Args:
        path: The wheel. It appears only when it is complete.
        dist_info: The name of its .dist-info folder.
    """

    def __init__(self, path: Path, dist_info: str):
        """Opens a file beside the wheel's path."""
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._out = self._part.open("wb")
        self._dist_info = dist_info
        self._central: list[bytes] = []
        self._record: list[tuple[str, str, int | str]] = []

    def __enter__(self) -> "WheelWriter":
        """Returns the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Completes the wheel, or removes it after an error."""
        if kind is None:
            self._finish()
        self._out.close()
        if kind is None:
            self._part.replace(self.path)
        else:
            self._part.unlink()

    def add(self, name: str, data: bytes) -> None:
        """Adds a file by its content."""
        self._record.append((name, record_hash(data), len(data)))
        self._add(name, data)

    def copy(
        self,
        source: zipfile.ZipFile,
        info: zipfile.ZipInfo,
        record: tuple[str, int],
        name: str | None = None,
    ) -> None:
        """Copies a file from another archive without inflating it.

        Args:
            source: The archive that holds it.
            info: Its entry there.
            record: Its hash and size from that archive's RECORD.
            name: Its new name; the same where None.
        """
        name = name or info.filename
        stream = source.fp
        stream.seek(info.header_offset)
        header = _LOCAL.unpack(stream.read(_LOCAL.size))
        stream.seek(header[-2] + header[-1], 1)  # its name and its extra field
        raw = stream.read(info.compress_size)
        sizes = (info.CRC, info.compress_size, info.file_size)
        self._record.append((name, *record))
        self._write(name, info.compress_type, sizes, info.external_attr, raw)

    def _add(self, name: str, data: bytes) -> None:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        raw = deflate.compress(data) + deflate.flush()
        sizes = (zlib.crc32(data), len(raw), len(data))
        self._write(name, zipfile.ZIP_DEFLATED, sizes, _MODE, raw)

    def _write(self, name: str, method: int, sizes: tuple, mode: int, raw: bytes):
        encoded = name.encode("utf-8")
        flags = 0 if name.isascii() else _UTF8
        common = (20, flags, method, 0, _DATE, *sizes, len(encoded), 0)
        offset = self._out.tell()
        self._out.write(_LOCAL.pack(b"PK\3\4", *common) + encoded + raw)
        unix = (3 << 8) | 20
        entry = _CENTRAL.pack(b"PK\1\2", unix, *common, 0, 0, 0, mode, offset)
        self._central.append(entry + encoded)

    def _finish(self) -> None:
        name = f"{self._dist_info}/RECORD"
        text = io.StringIO()
        rows = [*self._record, (name, "", "")]
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._add(name, text.getvalue().encode("utf-8"))
        start, count = self._out.tell(), len(self._central)
        central = b"".join(self._central)
        end = _END.pack(b"PK\5\6", 0, 0, count, count, len(central), start, 0)
        self._out.write(central + end)
