"""Images and audio of calibration rows: found in a row, read and decoded, never fetched."""

from __future__ import annotations

import base64
import io
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from fp8calib.data.modality import MEDIA, Modality
from fp8calib.errors import DataError, Fp8CalibError, UsageError, first_line, shorten

MAX_SAMPLES = 2**28
"""The longest sound at the rate of the model: hours."""
_URL = re.compile(r"(?i)(?!file:)[a-z][a-z0-9+.-]*://")
_BUFFER = re.compile(r"<_io\.BytesIO[^>]*>")
_DATA_URI = re.compile(r"(?i)data:[^,]*;base64,")
_KEYS = ("url", "path", "base64", "bytes", "data")
_BASE64 = frozenset({"base64", "data"})
_HELD = frozenset({"bytes", "array"})
"""What `datasets` gives for an image or a sound: encoded, or decoded."""
_TYPES = {
    **{str(kind): kind for kind in MEDIA},
    **{f"{kind}_url": kind for kind in MEDIA},
    "input_audio": Modality.AUDIO,
    "input_image": Modality.IMAGE,
}
"""The types of parts: those of transformers and of OpenAI's API."""
_VIDEO_TYPES = ("video", "video_url", "input_video")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Medium:
    """One image or sound of a row, not read yet."""

    kind: Modality
    value: Any
    """A path, a data URI, bytes, `{"bytes", "path"}` of `datasets`, or what is decoded already."""
    origin: str
    folder: Path
    """Relative paths start here."""

    @property
    def label(self) -> str:
        """Where it stands, and the path of its file if it has one."""
        value = self.value.get("path") if isinstance(self.value, Mapping) else self.value
        is_path = isinstance(value, str | Path) and str(value)[:5].lower() != "data:"
        return f"{self.origin} ({shorten(str(value))})" if is_path else self.origin


def parse_media_part(
    part: Mapping[str, Any], origin: str, folder: Path
) -> Medium | Modality | None:
    """Read a part of a message: a medium, the kind of one in a column, or None for another part."""
    if part.get("type") in _VIDEO_TYPES:
        raise refuse_video(origin)
    kind = _TYPES.get(str(part.get("type")))
    if kind is None:
        return None
    holder = part
    names: tuple[str, ...] = (str(kind), f"{kind}_url", f"input_{kind}", *_KEYS)
    while True:
        key = next((name for name in names if holder.get(name) is not None), "")
        value = holder.get(key)
        if not isinstance(value, Mapping) or _HELD & value.keys():
            break
        holder, names = value, _KEYS
    if value is None:
        return kind
    if key in _BASE64 and isinstance(value, str) and not _DATA_URI.match(value):
        value = f"data:;base64,{value}"
    return Medium(kind=kind, value=value, origin=origin, folder=folder)


def refuse_video(origin: str) -> DataError:
    """Make the error for a row with a video."""
    return DataError(
        f"{origin}: videos are not read",
        hint="give frames as images, or use --text-column to leave the column out",
    )


# --- decoding ------------------------------------------------------------------------------------


def load_image(medium: Medium) -> Any:
    """Decode an image: a `PIL.Image` in RGB, turned upright."""
    with _decoding(medium, package="Pillow"):
        from PIL import Image, ImageOps  # noqa: PLC0415  optional

        image = medium.value
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        elif not isinstance(image, Image.Image):
            image = Image.open(io.BytesIO(read_bytes(medium)))
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "FI":  # greys of 16 bits keep their high bytes
            values = np.asarray(image)
            if image.mode == "F" or not 0 <= values.min() <= values.max() < 2**16:
                raise TypeError("a grey that is no integer of 8 or 16 bits")
            image = Image.fromarray((values >> 8).astype(np.uint8))
        if not image.has_transparency_data:
            return image.convert("RGB")
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


def load_audio(medium: Medium, rate: int) -> npt.NDArray[np.float32]:
    """Decode a sound: fp32 [samples], one channel, at `rate` samples per second."""
    with _decoding(medium, package="soundfile"):
        samples, had = _read_samples(medium, rate)
    samples = samples.astype(np.float32)
    if samples.ndim == 2:
        samples = samples.mean(axis=int(np.argmin(samples.shape)))
    is_sound = samples.ndim == 1 and samples.size and np.isfinite(samples).all() and had > 0
    if not is_sound or len(samples) * rate / had > MAX_SAMPLES:
        raise DataError(
            f"{medium.label}: the sound, of shape {list(samples.shape)} at {had} Hz, is not 1 to "
            f"{MAX_SAMPLES} finite samples of one channel",
            hint="write it again, as [samples] of one channel, with its rate",
        )
    if had == rate:
        return samples
    with _decoding(medium, package="soxr"):
        import soxr  # noqa: PLC0415  optional

        resampled: npt.NDArray[np.float32] = soxr.resample(samples, had, rate)
    return resampled


def _read_samples(medium: Medium, rate: int) -> tuple[npt.NDArray[Any], float]:
    """Give samples and their rate; an array alone has the rate of the model."""
    value = medium.value
    if isinstance(value, np.ndarray):
        value = {"array": value, "sampling_rate": rate}
    if not isinstance(value, Mapping) or value.get("array") is None:
        import soundfile  # noqa: PLC0415  optional

        with soundfile.SoundFile(io.BytesIO(read_bytes(medium))) as file:
            samples = file.read(dtype="float32", always_2d=True)
            return samples.mean(axis=1), float(file.samplerate)
    samples, had = np.asarray(value["array"]), float(value["sampling_rate"])
    if samples.dtype == np.int16:
        return samples / np.float32(2**15), had
    if samples.size and not np.issubdtype(samples.dtype, np.floating):
        raise TypeError(f"samples are floating-point or int16, found {samples.dtype}")
    return samples, had


@contextmanager
def _decoding(medium: Medium, *, package: str) -> Iterator[None]:
    """Say of what medium an error is, and that a package is missing."""
    try:
        yield
    except Fp8CalibError:
        raise
    except ImportError as error:
        extra = "images" if medium.kind is Modality.IMAGE else "audio"
        raise UsageError(
            f"{medium.origin}: {package}, which reads the {medium.kind}, is not installed",
            hint=f'pip install "fp8calib[{extra}]"',
        ) from error
    except Exception as error:  # decoders raise anything for damaged files
        raise DataError(
            f"{medium.label}: the {medium.kind} cannot be decoded "
            f"({type(error).__name__}: {_BUFFER.sub('it', first_line(error))})",
            hint="it may be truncated, too large, or of another format: write it again",
        ) from error


def read_bytes(medium: Medium) -> bytes:
    """Give the encoded bytes of a medium; `_decoding` explains errors but those of paths."""
    value = medium.value
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str | Path):
        raise TypeError(f"{type(value).__name__} is no path, data URI or bytes")
    text = str(value)
    if (start := _DATA_URI.match(text)) is not None:
        return base64.b64decode("".join(text[start.end() :].split()), validate=True)
    if _URL.match(text):
        raise DataError(
            f"{medium.origin}: {shorten(text)} is a URL, and nothing is fetched from the network",
            hint="download it, and name the file",
        )
    is_uri = text[:7].lower() == "file://"
    path = medium.folder / (unquote(text[7:]) if is_uri else text)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            raise OSError("not a file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise DataError(
            f"{medium.origin}: {shorten(str(path))} cannot be read ({why})",
            hint="a path is relative to the file that names it",
        ) from error
