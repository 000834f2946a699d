"""Tiny random models that see or hear, with their own processors, written as checkpoint folders."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.utils import is_torchvision_available


@dataclass(frozen=True)
class Kind:
    """One model type with its processor."""

    config: dict[str, Any]
    processor: str
    """Its class."""
    parts: dict[str, tuple[str, dict[str, Any]]]
    """What the processor is made of, each a class and its settings."""
    placeholders: dict[str, str]
    """What the chat template writes for a medium."""
    ids: dict[str, str | list[str]]
    """The entries of the config, by dotted path, that hold the id of a token, or several."""
    named: dict[str, str] = field(default_factory=dict)
    """Tokens that the tokenizer has as attributes."""
    tokens: list[str] = field(default_factory=list)
    """Further special ones."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the processor."""
    needs: list[str] = field(default_factory=list)
    """Packages that its processor or its model cannot do without, but this project can."""
    needs_media: bool = False
    """Whether the processor refuses a row without media."""
    takes_several: bool = True
    """Whether a row can have several media of one modality."""
    starts: bool = True
    """Whether the chat template writes the token that starts a row."""

    def make_processor(self, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        """Make the processor.

        With torchvision, transformers loads the class without `Pil`, whose pixels differ a little.
        """
        backend = "Pil" if is_torchvision_available() else ""
        built = {
            key: getattr(transformers, part.removesuffix(backend))(**own)
            for key, (part, own) in self.parts.items()
        }
        make = getattr(transformers, self.processor)
        processor = make(**built, tokenizer=tokenizer, **self.settings)
        processor.chat_template = tokenizer.chat_template
        return processor


_KNOWN = yaml.safe_load(Path(__file__).with_name("multimodal_kinds.yaml").read_text())
MULTIMODAL = {name: Kind(**each) for name, each in _KNOWN["kinds"].items()}
WIDE: dict[str, dict[str, Any]] = _KNOWN["wide"]
"""Kinds that engines fill, and the fields of their text in sizes of an engine's kernels."""
_BASIC = ("<pad>", "<s>", "</s>", "<unk>")
_TURNS = ("<|user|>", "<|assistant|>", "<|end|>")


def build_tokenizer(kind: Kind) -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes, one token each, and of the kind's own tokens."""
    special = [*dict.fromkeys((*_TURNS, *kind.named.values(), *kind.tokens))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: i for i, each in enumerate([*_BASIC, *alphabet, *special])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*_BASIC, *special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _BASIC, strict=True)),
        extra_special_tokens=kind.named,
        chat_template=_write_template(kind),
    )


def _write_template(kind: Kind) -> str:
    media = "".join(
        f"{{% elif part.type == '{medium}' %}}{token}"
        for medium, token in kind.placeholders.items()
    )
    return (
        ("{{ bos_token }}" if kind.starts else "")
        + "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}" + media + "{% endif %}"
        "{% endfor %}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def build_config(name: str, tokenizer: PreTrainedTokenizerFast, **text: object) -> PreTrainedConfig:
    """Build a kind's config; ids of tokens are those of `tokenizer`, `text` changes its decoder."""
    kind = MULTIMODAL[name]
    settings = _copy(kind.config)
    settings.get("text_config", settings).update(text)
    if "out_hidden_size" in (tower := settings.get("vision_config", {})):
        tower["out_hidden_size"] = text.get("hidden_size", tower["out_hidden_size"])
    for path, tokens in kind.ids.items():
        *parents, last = path.split(".")
        place = settings
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = tokenizer.convert_tokens_to_ids(tokens)
    return AutoConfig.for_model(name, **settings)


def _copy(settings: Any) -> Any:
    return {k: _copy(v) for k, v in settings.items()} if isinstance(settings, dict) else settings


def build_multimodal(
    name: str, *, seed: int = 0, **text: object
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Build a random fp32 model in which every parameter matters, and its processor.

    `text` changes the config of its decoder.
    """
    kind = MULTIMODAL[name]
    tokenizer = build_tokenizer(kind)
    torch.manual_seed(seed)
    config = build_config(name, tokenizer, **text)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.clamp_(-1e3, 1e3)  # bounds that training sets are infinite at first
    return model, kind.make_processor(tokenizer)


def save_multimodal(name: str, folder: Path, **text: object) -> None:
    """Write a model of the kind with its tokenizer, processor and chat template."""
    model, processor = build_multimodal(name, **text)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def parametrize(names: list[str] | None = None) -> pytest.MarkDecorator:
    """Run a test for each kind; those that need a package that is absent are skipped by name."""
    return pytest.mark.parametrize("name", [_mark(name) for name in names or sorted(MULTIMODAL)])


def _mark(name: str) -> Any:
    absent = [each for each in MULTIMODAL[name].needs if find_spec(each) is None]
    reason = f"{name} needs {' and '.join(absent)}"
    return pytest.param(name, marks=pytest.mark.skipif(bool(absent), reason=reason))


def encode(processor: ProcessorMixin, row: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make the inputs of a model in fp32 of one row.

    The template is the tokenizer's where the processor's class cannot keep one (Chameleon's).
    """
    template = processor.chat_template or processor.tokenizer.chat_template
    return processor.apply_chat_template(
        row, chat_template=template, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(torch.float32)


def draw_image(seed: int, size: tuple[int, int] = (32, 32)) -> Image.Image:
    """Draw shapes, a plot and text on an image of width and height `size`, the same each time."""
    rng = np.random.default_rng(seed)
    width, height = size
    image = Image.new("RGB", size, tuple(int(x) for x in rng.integers(0, 256, 3)))
    pen = ImageDraw.Draw(image)
    for shape in (pen.ellipse, pen.rectangle):
        x, y = rng.integers(0, width // 2 + 1), rng.integers(0, height // 2 + 1)
        box = (x, y, x + width // 2, y + height // 2)
        shape([int(each) for each in box], fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
    heights = rng.random(8) * (height - 1)
    pen.line([(i * (width - 1) / 7, float(y)) for i, y in enumerate(heights)], fill="black")
    pen.text((1, 1), f"{seed}", fill="white")
    return image


def make_tone(seed: int, seconds: float = 0.5) -> np.ndarray:
    """Make a chord of three tones with a little noise, float32 [samples] in -1 ... 1, at 16 kHz."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * 16000)) / 16000
    tones = sum(np.sin(2 * np.pi * each * time) for each in rng.uniform(100, 2000, 3))
    return (tones * 0.25 + rng.normal(0, 0.02, len(time))).astype(np.float32)


def user(*parts: str | Image.Image | np.ndarray) -> list[dict[str, Any]]:
    """Write one message of a user, of text, images and audio in this order."""
    return [{"role": "user", "content": [_part(each) for each in parts]}]


def _part(value: str | Image.Image | np.ndarray) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if isinstance(value, Image.Image):
        return {"type": "image", "image": value}
    return {"type": "audio", "audio": value}


def messages(name: str, *, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Write rows for a kind: text alone if it takes that, one medium, two of another size, all.

    Every row has text around its media, and the sizes of images and lengths of audio differ.
    """
    kind = MULTIMODAL[name]
    rows = [] if kind.needs_media else [user("What do you know about llamas?")]
    media: list[Any] = []
    if "image" in kind.placeholders:
        one, two = draw_image(seed, (32, 32)), draw_image(seed + 1, (48, 24))
        rows += [user(one, "What is this?"), user(one, "Look. ", two, "Compare them!")]
        media.append(one)
    if "audio" in kind.placeholders:
        rows.append(user(make_tone(seed, 0.5), "What was said?"))
        media.append(make_tone(seed, 0.5))
    if "audio" in kind.placeholders and kind.takes_several:
        rows.append(user(make_tone(seed + 1, 0.4), "And ", make_tone(seed + 2, 0.7), "here?"))
    return [*rows, user(*media, "Both?")] if len(media) > 1 else rows
