# SPDX-License-Identifier: Apache-2.0
"""Files as they are read: plain, gzip or Zstandard, always as bytes, forward. Damage is an EOFError, whatever the format."""

import gzip
import importlib.util
import io
import zlib

# By ending: what the format is called, and the package that reads it.
PACKAGES = {".zst": ("Zstandard", "zstandard"), ".parquet": ("Parquet", "pyarrow")}
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)


def require_package(path: str) -> None:
    """Raises ValueError if the file needs a package that is not installed; imports nothing."""
    for suffix, (name, package) in PACKAGES.items():
        if path.endswith(suffix) and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--input: {path} is a {name} file, and the package {package} is not installed: "
                f"pip install {package}, or pip install 'zaya_plugin[data]'"
            )


def kind(path: str) -> str:
    """ "gzip", "zstd" or "" from the name."""
    return "gzip" if path.endswith(".gz") else "zstd" if path.endswith(".zst") else ""


def unpacked(path: str, raw):
    """A stream over an open file, with read, read1, readline, tell and forward seek.

    Its reads raise one of DAMAGE where the packed data are damaged or end early.
    """
    if kind(path) == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if kind(path) == "zstd":
        return io.BufferedReader(_ZstdStream(raw), 1 << 17)
    return raw


class _ZstdStream(io.RawIOBase):
    """Frames one after the other. zstandard's own reader takes a file that ends within a frame for a whole one."""

    def __init__(self, raw):
        import zstandard

        self.raw, self.position, self.pending = raw, 0, b""
        self.error, self.start = zstandard.ZstdError, zstandard.ZstdDecompressor
        self.frame = None
        self.packed = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.pending:
            if self.frame is None or self.frame.eof:
                self.packed = (self.frame.unused_data if self.frame is not None else b"") or self.raw.read(1 << 16)
                if not self.packed:
                    return 0
                self.frame = self.start().decompressobj()
            else:
                self.packed = self.raw.read(1 << 16)
                if not self.packed:
                    raise EOFError("it ends within a frame")
            try:
                self.pending = self.frame.decompress(self.packed)
            except self.error as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self.pending))
        buffer[:count], self.pending = self.pending[:count], self.pending[count:]
        self.position += count
        return count

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET and offset >= self.position, "only forward"
        step = bytearray(1 << 16)
        while self.position < offset and self.readinto(memoryview(step)[: offset - self.position]):
            pass
        return self.position
