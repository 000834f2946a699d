"""Turn rows with images or audio into token ids and tensors, by the model's own processor.

A row is encoded once when the data is planned, and again when it is run: the tensors of all rows
together would need more memory than the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fp8calib.data.media import Medium, load_audio, load_image
from fp8calib.data.modality import MEDIA, MODALITIES, Modality, find_placeholders
from fp8calib.data.rows import ContentPart, Message, Row, has_chat_template
from fp8calib.errors import DataError, UsageError, first_line

_NO_MEDIA = frozenset({"input_ids", "attention_mask", "labels"})
_PER_TOKEN = ("token_type_ids", "cross_attention_mask")
"""Endings of the names of tensors [1, S, ...]; others may have S features or samples by chance."""
_DEFAULT_RATE = 16000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaRow:
    """A row with media, encoded: its tokens, and what makes its tensors again."""

    row: Row
    ids: torch.Tensor
    """int64 [S]: one placeholder for each token that a medium fills."""
    kinds: torch.Tensor
    """int8 [S]: the index in `MODALITIES` of what each token stands for."""
    digest: str
    """sha256 (hex) over all tensors of the row: pixels, samples and their shapes."""
    encoder: MediaEncoder
    num_cut: int = 0
    """How many tokens at the end of the row are left out."""

    def load(self) -> dict[str, torch.Tensor]:
        """Give the tensors that the model takes beside the tokens; refuse media that changed."""
        tensors = self.encoder.process(self.row)
        if _hash_tensors(tensors) != self.digest:
            raise DataError(
                f"{self.row.origin}: its media changed while the run went on",
                hint="leave the files as they are until the run ends",
            )
        length = len(self.ids)
        return {
            name: x[:, :length] if self.num_cut and name.endswith(_PER_TOKEN) else x
            for name, x in tensors.items()
            if name not in _NO_MEDIA
        }

    def cut(self, length: int) -> MediaRow:
        """Drop the text after `length` tokens; refuse to cut a medium."""
        needed = int(self.kinds.nonzero().max()) + 1
        if length >= len(self.ids):
            return self
        if length < needed:
            raise DataError(
                f"{self.row.origin}: its media end at token {needed}, beyond --seq-len {length}",
                hint=f"use --seq-len {needed} or more, or smaller images",
            )
        num_cut = len(self.ids) - length
        return replace(self, ids=self.ids[:length], kinds=self.kinds[:length], num_cut=num_cut)


class MediaEncoder:
    """Encodes rows with the processor of one model."""

    def __init__(self, processor: Any, config: Any, name: str) -> None:
        """Take a processor of transformers, and the config of its model, which is called `name`."""
        self._processor = processor
        self._name = name
        self._placeholders = find_placeholders(config, processor)
        self.tokenizer = processor.tokenizer
        self.template = processor if has_chat_template(processor) else self.tokenizer
        if not has_chat_template(self.template):
            raise DataError(
                f"{name}: its processor has no chat template, which says where images and sounds "
                "stand",
                hint="copy the one that the model was published with, or give rows without media",
            )
        parts = (
            getattr(processor, part, None) for part in ("feature_extractor", "audio_processor")
        )
        rates = (getattr(part, "sampling_rate", None) for part in parts)
        self._rate = int(next(filter(None, rates), _DEFAULT_RATE))
        """The sampling rate that the processor expects of audio, in Hz."""

    def encode(self, row: Row) -> MediaRow:
        """Encode a row that has media."""
        taken = set(self._placeholders.values())
        if medium := _find_other(row, taken):
            raise DataError(
                f"{medium.origin}: {self._name} takes no {medium.kind}, only "
                f"{' and '.join(kind for kind in MEDIA if kind in taken) or 'text'}",
                hint="use other data, or --text-column to leave out columns of media",
            )
        tensors = self.process(row)
        ids = tensors["input_ids"][0].to(torch.int64)
        kinds = torch.zeros(len(ids), dtype=torch.int8)
        for token, kind in self._placeholders.items():
            kinds[ids == token] = MODALITIES.index(kind)
        if medium := _find_other(row, {MODALITIES[code] for code in set(kinds.tolist())}):
            raise DataError(
                f"{medium.label}: the processor and chat template of {self._name} leave no token "
                f"for the {medium.kind}",
                hint=f"the {medium.kind} is too small or short for one, or the template is for "
                "text only: copy the one published with the model",
            )
        return MediaRow(row=row, ids=ids, kinds=kinds, digest=_hash_tensors(tensors), encoder=self)

    def process(self, row: Row) -> dict[str, torch.Tensor]:
        """Let the processor make all tensors of a row."""
        rate: dict[str, int] = {}

        def decode(part: ContentPart) -> Message:
            if not isinstance(part, Medium):
                return {"type": "text", "text": part}
            if part.kind is Modality.IMAGE:
                return {"type": "image", "image": load_image(part)}
            rate["sampling_rate"] = self._rate
            return {"type": "audio", "audio": load_audio(part, self._rate)}

        messages = []
        for message in row.messages or ():
            content = message["content"]
            parts = content if isinstance(content, list) else [content]
            messages.append({**message, "content": list(map(decode, parts))})
        # The classes of some processors cannot keep the template, which is then the tokenizer's.
        is_own = self.template is self._processor
        try:
            inputs = self._processor.apply_chat_template(
                messages,
                chat_template=None if is_own else self.tokenizer.chat_template,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs=rate,
            )
            return {
                key: value
                if isinstance(value, torch.Tensor)
                else torch.as_tensor(np.asarray(value))
                for key, value in inputs.items()
                if value is not None
            }
        except ImportError as error:
            raise UsageError(
                f"{row.origin}: {type(self._processor).__name__} needs a package that is not "
                f"installed ({first_line(error)})",
                hint='pip install "fp8calib[images,audio]", or the package that it names',
            ) from error
        except Exception as error:  # templates and processors are programs that raise anything
            raise DataError(
                f"{row.origin}: {type(self._processor).__name__} of {self._name} refuses the row "
                f"({type(error).__name__}: {first_line(error)})",
                hint="check the order of the roles, and that the model takes such media",
            ) from error


def _find_other(row: Row, kinds: Collection[Modality]) -> Medium | None:
    """Find the first medium whose kind is not among `kinds`."""
    return next((medium for medium in row.media if medium.kind not in kinds), None)


def _hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
