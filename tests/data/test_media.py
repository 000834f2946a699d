"""Every accepted form of an image and a sound, against what was drawn or written."""

import base64
import io
import json
import struct
import textwrap
import wave
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fp8calib.data.media import Medium, load_audio, load_image
from fp8calib.data.modality import Modality
from fp8calib.data.plan import RowEncoder, build_plan
from fp8calib.data.processor import MediaEncoder
from fp8calib.data.rows import Row, parse_row
from fp8calib.data.sources import iter_rows, split_data
from fp8calib.data.specs import parse_spec
from fp8calib.errors import DataError
from tests.kit.multimodal import build_multimodal, draw_image

PIXELS = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[9, 8, 7], [250, 251, 252], [0, 0, 0]]], np.uint8
)
"""Two rows of three pixels."""
OTHER = PIXELS[::-1].copy()
TONE = np.array([0, 8192, 16384, -32768, 4096], np.int16)
"""As fp32: 0, 0.25, 0.5, -1, 0.125."""
SOUND = np.array([0, 0.25, 0.5, -1, 0.125], np.float32)


def chunk(name: bytes, content: bytes) -> bytes:
    checked = name + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def write_png(values: np.ndarray, *, colour: int = 2, depth: int = 8, extra: bytes = b"") -> bytes:
    """Write a PNG by hand, each line unfiltered (ISO/IEC 15948)."""
    height, width = values.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(lines))
    return b"\x89PNG\r\n\x1a\n" + header + extra + body + chunk(b"IEND", b"")


def write_wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    """Write int16 [samples, channels] by the standard library."""
    found = io.BytesIO()
    with wave.open(found, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return found.getvalue()


PNG = write_png(PIXELS)
WAV = write_wav(TONE)


def encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the images and sounds that rows name."""
    place = tmp_path / "rows"
    place.mkdir()
    (place / "a b.png").write_bytes(PNG)
    (place / "other.png").write_bytes(write_png(OTHER))
    (place / "a b.wav").write_bytes(WAV)
    return place


def read(row: dict[str, Any], folder: Path) -> Row:
    return parse_row(row, "x:1", folder=folder)


def look(row: Row) -> list[list[list[list[int]]]]:
    return [np.asarray(load_image(each)).tolist() for each in row.media]


def in_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}


@pytest.mark.parametrize("kind", ["image", "audio"])
@pytest.mark.parametrize(
    "form",
    [
        "relative", "absolute", "uri", "uri-escaped", "path-key", "url-key", "data-uri", "base64",
        "wrapped-base64", "bytes", "held-bytes", "held-path", "url-part", "openai", "column",
        "columns", "column-of-dicts", "memory",
    ],
)  # fmt: skip
def test_a_form_gives_what_was_written(folder: Path, kind: str, form: str) -> None:
    raw = PNG if kind == "image" else WAV
    name = "a b.png" if kind == "image" else "a b.wav"
    uri = f"data:{kind}/x;base64,{encode(raw)}"
    text = encode(raw)
    openai = {
        "image": {"type": "image_url", "image_url": {"url": uri, "detail": "high"}},
        "audio": {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    }
    memory = {"image": Image.fromarray(PIXELS), "audio": SOUND}
    rows: dict[str, dict[str, Any]] = {
        "relative": in_part({"type": kind, kind: name}),
        "absolute": in_part({"type": kind, kind: str(folder / name)}),
        "uri": in_part({"type": kind, kind: f"file://{folder / name}"}),
        "uri-escaped": in_part({"type": kind, kind: (folder / name).as_uri()}),
        "path-key": in_part({"type": kind, "path": name, "text": None}),
        "url-key": in_part({"type": kind, "url": uri}),
        "data-uri": in_part({"type": kind, kind: uri}),
        "base64": in_part({"type": kind, "base64": text}),
        "wrapped-base64": in_part({"type": kind, "base64": "\n".join(textwrap.wrap(text, 20))}),
        "bytes": in_part({"type": kind, kind: raw}),
        "held-bytes": in_part({"type": kind, kind: {"bytes": raw, "path": "gone"}}),
        "held-path": in_part({"type": kind, kind: {"bytes": None, "path": name}}),
        "url-part": in_part({"type": f"{kind}_url", f"{kind}_url": name}),
        "openai": in_part(openai[kind]),
        "column": {"text": "?", kind: name},
        "columns": {"text": "?", f"{kind}s": [name]},
        "column-of-dicts": {"text": "?", f"{kind}s": [{"url": uri}]},
        "memory": in_part({"type": kind, kind: memory[kind]}),
    }  # fmt: skip
    row = read(rows[form], folder)
    assert row.messages is not None
    medium, text = row.messages[0]["content"]
    assert (medium.kind, text) == (kind, "?")
    if kind == "image":
        assert look(row) == [PIXELS.tolist()]
    else:
        (medium,) = row.media
        np.testing.assert_array_equal(load_audio(medium, 16000), SOUND)


ALPHA = np.dstack([PIXELS, np.array([[255, 0, 255], [255, 0, 255]], np.uint8)])
ON_WHITE = np.where(ALPHA[..., 3:] == 0, np.uint8(255), PIXELS)
COLOURS = chunk(b"PLTE", bytes([1, 2, 3, 200, 100, 50]))
INDICES = np.array([[0, 1], [1, 0]], np.uint8)
PALETTE = np.array([[1, 2, 3], [200, 100, 50]], np.uint8)
GREY16 = np.array([[0, 255, 256], [32768, 65535, 513]], ">u2")


def save(image: Image.Image, suffix: str, **options: Any) -> bytes:
    found = io.BytesIO()
    image.save(found, suffix, **options)
    return found.getvalue()


def write_turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(Image.fromarray(PIXELS), "png", exif=exif.tobytes())


INK = np.array([[[255, 0, 0, 0], [0, 0, 0, 255], [0, 255, 255, 0]]], np.uint8)
IMAGES = {
    "rgb": (PNG, PIXELS),
    "alpha": (write_png(ALPHA, colour=6), ON_WHITE),
    "palette": (write_png(INDICES, colour=3, extra=COLOURS), PALETTE[INDICES]),
    "clear palette": (
        write_png(INDICES, colour=3, extra=COLOURS + chunk(b"tRNS", b"\0")),
        np.array([[255, 255, 255], [200, 100, 50]], np.uint8)[INDICES],
    ),
    "grey": (write_png(INDICES, colour=0), np.stack([INDICES] * 3, axis=-1)),
    "16 bits": (
        write_png(GREY16, colour=0, depth=16),
        np.stack([(GREY16 >> 8).astype(np.uint8)] * 3, axis=-1),
    ),
    "cmyk": (
        save(Image.fromarray(INK, "CMYK"), "tiff"),
        np.array([[[0, 255, 255], [0, 0, 0], [255, 0, 0]]], np.uint8),
    ),
    "upside down": (write_turned(3), PIXELS[::-1, ::-1]),
    "on its side": (write_turned(6), np.rot90(PIXELS, -1)),
    "mirrored": (write_turned(2), PIXELS[:, ::-1]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_every_kind_become_rgb_and_stand_upright(name: str, tmp_path: Path) -> None:
    raw, expected = IMAGES[name]
    (found,) = look(read({"text": "?", "image": raw}, tmp_path))
    assert found == expected.tolist()


def test_arrays_are_pixels_of_eight_bits() -> None:
    row = parse_row({"text": "?", "images": [PIXELS, Image.fromarray(ALPHA)]}, "x:1")
    assert look(row) == [PIXELS.tolist(), ON_WHITE.tolist()]
    for wrong in (PIXELS / 255, PIXELS.astype(np.uint16), PIXELS.astype(np.int64)):
        with pytest.raises(DataError, match="cannot be decoded"):
            look(parse_row({"text": "?", "image": wrong}, "x:1"))
    with pytest.raises(DataError, match="a grey that is no integer of 8 or 16 bits"):
        look(parse_row({"text": "?", "image": Image.new("F", (2, 2))}, "x:1"))


def hear(value: Any) -> np.ndarray:
    return load_audio(Medium(kind=Modality.AUDIO, value=value, origin="x:1", folder=Path()), 16000)


def test_channels_are_averaged() -> None:
    left, right = TONE, np.array([0, 8192, 0, -32768, 0], np.int16)
    mean = np.array([0, 0.25, 0.25, -1, 0.0625], np.float32)
    both = np.stack([left, right], axis=1)
    np.testing.assert_array_equal(hear(write_wav(both)), mean)
    for array in (both, both.T, both.astype(np.float32) / 32768):
        np.testing.assert_array_equal(hear({"array": array, "sampling_rate": 16000}), mean)
        np.testing.assert_array_equal(hear(array), mean)


def test_another_rate_is_resampled() -> None:
    """A tone of 200 Hz stays one: the same cosine, at the rate of the model."""
    for rate in (8000, 44100):
        time = np.arange(rate) / rate
        tone = np.cos(2 * np.pi * 200 * time)
        raw = write_wav((tone * 16384).astype(np.int16), rate)
        for value in (raw, {"array": tone * 0.5, "sampling_rate": rate}):
            found = hear(value)
            assert len(found) == 16000
            assert found.dtype == np.float32
            expected = 0.5 * np.cos(2 * np.pi * 200 * np.arange(16000) / 16000)
            assert np.abs(found - expected)[500:-500].max() < 2e-3


def test_videos_are_refused(tmp_path: Path) -> None:
    parts = [{"type": "video", "video": "v.mp4"}, {"type": "video_url", "video_url": {"url": "v"}}]
    columns = [{"video": "v.mp4"}, {"videos": ["v.mp4"]}, {"video": np.stack([PIXELS, OTHER])}]
    for row in (*map(in_part, parts), *({"text": "?", **column} for column in columns)):
        with pytest.raises(DataError, match="videos are not read"):
            read(row, tmp_path)
    assert not read({"text": "?", "video": None, "videos": []}, tmp_path).media


# --- columns and marks ----------------------------------------------------------------------------

A, B = "a b.png", "other.png"
TURN = {"role": "user", "content": "What?"}
ANSWER = {"role": "assistant", "content": "A plot."}
PARTS = [{"type": "text", "text": "One "}, {"type": "image"}, {"type": "image", "image": B}]


def show(row: Row) -> str:
    """Give each message's role and content, a medium as its path in brackets."""

    def spell(part: str | Medium) -> str:
        return f"[{part.value}]" if isinstance(part, Medium) else part

    return " | ".join(
        f"{m['role']}: {''.join(map(spell, m['content']))}" for m in row.messages or ()
    )


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ("human", "gpt") * len(texts)
    return [{"from": role, "value": text} for role, text in zip(roles, texts, strict=False)]


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"text": "What?", "image": A}, f"user: [{A}]What?"),
    ({"text": "What?", "images": [A, B]}, f"user: [{A}][{B}]What?"),
    (
        {"text": "Is <image> like <image>?", "images": [A, B]},
        f"user: Is [{A}] like [{B}]?",
    ),
    (
        {"conversations": talk("<image>\nWhat?", "A plot."), "image": A},
        f"user: [{A}]\nWhat? | assistant: A plot.",
    ),
    (
        {"conversations": talk("Hi", "Hi", "See <image>", "So?"), "images": [B]},
        f"user: Hi | assistant: Hi | user: See [{B}] | assistant: So?",
    ),
    (
        {"messages": [{"role": "system", "content": "Be brief."}, TURN], "images": [A]},
        f"system: Be brief. | user: [{A}]What?",
    ),
    ({"messages": [{"role": "user", "content": PARTS}], "images": [A]}, f"user: One [{A}][{B}]"),
    (
        {"prompt": "What <image> is", "completion": " this.", "image": A},
        f"user: What [{A}] is this.",
    ),
    (
        {"prompt": [TURN], "completion": [ANSWER], "images": [A]},
        f"user: [{A}]What? | assistant: A plot.",
    ),
    (
        {"instruction": "Describe.", "input": "<image>", "output": "A plot.", "image": A},
        f"user: Describe.\n\n[{A}] | assistant: A plot.",
    ),
    ({"text": "All?", "audio": "s.wav", "images": [A]}, f"user: [{A}][s.wav]All?"),
    ({"text": "<audio>, <image>", "audio": "s.wav", "image": A}, f"user: [s.wav], [{A}]"),
    ({"text": "<audio> is a tag", "image": A}, f"user: [{A}]<audio> is a tag"),
]


@pytest.mark.parametrize(("row", "expected"), PLACES)
def test_media_of_columns_stand_at_the_marks_or_before_the_first_question(
    row: dict[str, Any], expected: str
) -> None:
    found = parse_row(row, "x:1")
    assert (show(found), found.text) == (expected, None)


def test_a_column_without_media_leaves_the_text() -> None:
    assert parse_row({"text": "a<b>", "images": []}, "x:1") == Row("x:1", text="a<b>")


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "saved", "saved files", "memory"])
def test_sources_give_their_images(form: str, folder: Path) -> None:
    """One row with an image, one with two: [A], [A, B] by file, or as `datasets` keeps them."""
    texts = ["one", "two"]
    files: list[list[str]] = [[A], [A, B]]
    path = folder / f"rows.{form}"
    plain = [{"text": t, "images": f} for t, f in zip(texts, files, strict=True)]
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, plain)))
    elif form == "json":
        path.write_text(json.dumps(plain))
    elif form == "parquet":
        held = [[{"bytes": (folder / f).read_bytes(), "path": f} for f in each] for each in files]
        pq.write_table(pa.table({"text": texts, "images": held}), path)
    elif form == "saved":
        column = datasets.Sequence(datasets.Image())
        features = datasets.Features({"text": datasets.Value("string"), "images": column})
        absolute = [[str(folder / f) for f in each] for each in files]
        made = datasets.Dataset.from_dict({"text": texts, "images": absolute}, features=features)
        path = folder / "saved"
        made.save_to_disk(path)
    elif form == "saved files":
        path = folder / "saved"
        above = [[f"../{f}" for f in each] for each in files]
        datasets.Dataset.from_dict({"text": texts, "images": above}).save_to_disk(path)
    if form == "memory":
        images = [[Image.open(folder / f) for f in each] for each in files]
        rows = split_data([{"text": t, "images": i} for t, i in zip(texts, images, strict=True)])[1]
        assert rows is not None
        found = list(rows)
    else:
        found = list(iter_rows(parse_spec(str(path))))
    assert [look(row) for row in found] == [
        [PIXELS.tolist()],
        [PIXELS.tolist(), OTHER.tolist()],
    ]


def test_a_saved_dataset_gives_its_sounds_undecoded(folder: Path) -> None:
    """A row is read without the decoder that `datasets` would need."""
    rows = {"text": ["a"], "audio": [{"bytes": WAV, "path": None}]}
    made = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio())
    made.save_to_disk(folder / "saved")
    (row,) = iter_rows(parse_spec(str(folder / "saved")))
    np.testing.assert_array_equal(load_audio(row.media[0], 16000), SOUND)


def test_media_that_change_after_planning_are_refused(tmp_path: Path) -> None:
    draw_image(0).save(tmp_path / "a.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "What?", "images": ["a.png"]}))
    model, processor = build_multimodal("gemma3")
    encoder = MediaEncoder(processor, model.config, "gemma3")
    plan = build_plan(
        RowEncoder(lambda: processor.tokenizer, 1000, media=lambda: encoder),
        sources=(str(rows),),
        samples=99,
        seq_len=64,
    )
    assert "pixel_values" in plan.media[0].load()
    draw_image(5).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: its media changed"):
        plan.media[0].load()
