"""Images, audio and video of calibration rows: found in a row, read and decoded, never fetched."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8calib.errors import DataError, UsageError, first_line, shorten


class Modality(StrEnum):
    """What a token of the text decoder stands for."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


MODALITIES = tuple(Modality)
"""In the order of their codes in tensors."""
MEDIA = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
COLUMNS = {name: kind for kind in MEDIA for name in (f"{kind}s", str(kind))}
"""The columns beside a conversation or text that hold media, by their names."""
MARKS = {kind: f"<{kind}>" for kind in MEDIA}
"""Where a medium of a column stands in plain text."""

MAX_PIXELS = 2**30 // 12
"""The largest image that is read: Pillow's own limit against decompression bombs."""
_URL = re.compile(r"(?i)(https?|s3|gs|ftp)://")
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Medium:
    """One image, video or sound of a row, not read yet."""

    kind: Modality
    value: Any
    """A path, a data URI, bytes, `{"bytes", "path"}` of `datasets`, or what is decoded already."""
    origin: str
    folder: Path
    """Relative paths start here."""


def parse_media(kind: Modality, value: object, origin: str, folder: Path) -> tuple[Medium, ...]:
    """Make the media of a column: one, or a list of them; nothing where it is null.

    A list of frames is one video if its items are no lists themselves.
    """
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(
        Medium(kind=kind, value=item, origin=f"{origin}[{index}]", folder=folder)
        for index, item in enumerate(items)
        if item is not None
    )


def parse_media_part(
    part: Mapping[str, Any], origin: str, folder: Path
) -> Medium | Modality | None:
    """Read a part of a message: a medium, the kind of one in a column, or None for another part."""
    kind = _TYPES.get(str(part.get("type")))
    if kind is None:
        return None
    names = (str(kind), f"{kind}_url", f"input_{kind}", *_KEYS)
    holder, found = part, next((name for name in names if part.get(name) is not None), "")
    while found and isinstance(holder[found], Mapping) and not _HELD & holder[found].keys():
        holder = holder[found]
        found = next((name for name in _KEYS if holder.get(name) is not None), "")
    value = holder[found] if found else None
    if found in _BASE64 and isinstance(value, str) and not _DATA_URI.match(value):
        value = f"data:;base64,{value}"
    if value is None:
        return kind
    return Medium(kind=kind, value=value, origin=origin, folder=folder)


# --- decoding ------------------------------------------------------------------------------------


def load_image(medium: Medium) -> Any:
    """Decode an image: a `PIL.Image` in RGB, turned upright.

    Raises:
        UsageError: Pillow is not installed.
        DataError: the image is missing, damaged or too large.
    """
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415  optional
    except ImportError as error:
        raise _missing("images", "Pillow", medium) from error
    if isinstance(medium.value, Image.Image):
        return ImageOps.exif_transpose(medium.value).convert("RGB")
    try:
        if isinstance(medium.value, np.ndarray):
            return Image.fromarray(medium.value).convert("RGB")
        with Image.open(io.BytesIO(read_bytes(medium))) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"{medium.origin}: the image has {width} x {height} pixels, more than "
                    f"{MAX_PIXELS}",
                    hint="scale it down: no model sees that many",
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except (DataError, UsageError):
        raise
    except Exception as error:  # decoders raise anything for damaged files
        raise _unreadable(medium, error) from error


def load_audio(medium: Medium, rate: int) -> npt.NDArray[np.float32]:
    """Decode a sound: fp32 [samples], one channel, at `rate` samples per second.

    Raises:
        UsageError: soundfile is not installed, or soxr where the rate differs.
        DataError: the sound is missing, damaged, empty, or holds NaN or inf.
    """
    value = medium.value
    if isinstance(value, Mapping) and value.get("array") is not None:
        found, had = np.asarray(value["array"], dtype=np.float32), value.get("sampling_rate")
        if found.ndim == 2:
            found = found.mean(axis=int(np.argmin(found.shape)))
    elif isinstance(value, np.ndarray):
        found, had = value.astype(np.float32), rate
    else:
        found, had = _decode_audio(medium)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise DataError(
            f"{medium.origin}: the sound has shape {list(found.shape)}, or holds NaN or inf",
            hint="write it again as one channel of finite samples",
        )
    return found if had in {rate, None} else _resample(found, float(had), rate, medium)


def load_video(medium: Medium) -> npt.NDArray[np.uint8]:
    """Decode a video: uint8 [frames, height, width, 3].

    Raises:
        UsageError: Pillow is not installed.
        DataError: the value is neither a list of frames nor an animated image.
    """
    value = medium.value
    if isinstance(value, np.ndarray):
        frames = value
    elif isinstance(value, list | tuple):
        frames = _stack_frames(
            [
                load_image(
                    Medium(
                        kind=Modality.IMAGE,
                        value=item,
                        origin=f"{medium.origin} frame {number}",
                        folder=medium.folder,
                    )
                )
                for number, item in enumerate(value)
            ],
            medium,
        )
    else:
        frames = _decode_frames(medium)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise DataError(
            f"{medium.origin}: a video is frames x height x width x 3 bytes, found "
            f"{frames.dtype} {list(frames.shape)}",
            hint="give a list of images of one size",
        )
    return frames


def read_bytes(medium: Medium) -> bytes:
    """Give the encoded bytes of a medium.

    Raises:
        DataError: it is a URL, a missing file, a broken data URI, or no form that is known.
    """
    value = medium.value
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        value = value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str | Path):
        raise DataError(
            f"{medium.origin}: {type(value).__name__} is no {medium.kind}",
            hint="give a path, a data URI, bytes, or a column of datasets with images or audio",
        )
    text = str(value)
    if found := _DATA_URI.match(text):
        return _decode_base64(text[found.end() :], medium)
    if _URL.match(text):
        raise DataError(
            f"{medium.origin}: {shorten(text)} is a URL, and nothing is fetched from the network",
            hint="download it, and name the file",
        )
    path = medium.folder / text.removeprefix("file://")
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{medium.origin}: {shorten(text)} cannot be read ({first_line(error)})",
            hint="a path is relative to the file that names it",
        ) from error


def _decode_base64(text: str, medium: Medium) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{medium.origin}: not base64 ({first_line(error)})", hint="encode the file again"
        ) from error


def _decode_audio(medium: Medium) -> tuple[npt.NDArray[np.float32], int]:
    try:
        import soundfile  # noqa: PLC0415  optional
    except (ImportError, OSError) as error:
        raise _missing("audio", "soundfile", medium) from error
    raw = read_bytes(medium)
    try:
        found, rate = soundfile.read(io.BytesIO(raw), dtype="float32", always_2d=True)
    except Exception as error:  # soundfile's own errors share no base class
        raise _unreadable(medium, error) from error
    return found.mean(axis=1), int(rate)


def _resample(
    found: npt.NDArray[np.float32], had: float, rate: int, medium: Medium
) -> npt.NDArray[np.float32]:
    try:
        import soxr  # noqa: PLC0415  optional
    except ImportError as error:
        raise _missing("audio", "soxr", medium) from error
    resampled: npt.NDArray[np.float32] = soxr.resample(found, had, rate)
    return resampled


def _decode_frames(medium: Medium) -> npt.NDArray[np.uint8]:
    """Decode the frames of an animated image (GIF, WebP, APNG)."""
    try:
        from PIL import Image, ImageSequence  # noqa: PLC0415  optional
    except ImportError as error:
        raise _missing("images", "Pillow", medium) from error
    raw = read_bytes(medium)
    try:
        with Image.open(io.BytesIO(raw)) as image:
            frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
    except Exception as error:  # decoders raise anything for damaged files
        raise DataError(
            f"{medium.origin}: not an animated image ({first_line(error)})",
            hint="give a list of frames: video files are not decoded here",
        ) from error
    return _stack_frames(frames, medium)


def _stack_frames(frames: Sequence[Any], medium: Medium) -> npt.NDArray[np.uint8]:
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1:
        raise DataError(
            f"{medium.origin}: a video of {len(frames)} frames of {len(sizes)} sizes",
            hint="give frames of one size",
        )
    return np.stack([np.asarray(frame) for frame in frames])


def _missing(extra: str, package: str, medium: Medium) -> UsageError:
    return UsageError(
        f"{medium.origin}: {package}, which reads the {medium.kind}, is not installed",
        hint=f'pip install "fp8calib[{extra}]"',
    )


def _unreadable(medium: Medium, error: Exception) -> DataError:
    return DataError(
        f"{medium.origin}: the {medium.kind} cannot be decoded "
        f"({type(error).__name__}: {first_line(error)})",
        hint="it may be truncated, or of another format: write it again",
    )


def iter_media(messages: Sequence[Mapping[str, Any]]) -> Iterator[Medium]:
    """Iterate over the media of messages, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            value = part.get(part["type"])
            if isinstance(value, Medium):
                yield value
