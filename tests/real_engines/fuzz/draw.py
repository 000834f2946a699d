"""Which checkpoints are made: each form, each damage and each architecture in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from tests.real_engines.fuzz.architectures import ARCHITECTURES
from tests.real_engines.fuzz.damage import Damage, read_damages
from tests.real_engines.fuzz.forms import FORMS

DAMAGES = {damage.name: damage for damage in read_damages()}
_UNDAMAGED_SHARE = 0.25
_TWICE_SHARE = 0.1
"""Of the damaged checkpoints, how many have a second damage."""
_DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32")
_NONE = "none"
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint: what makes its bytes."""

    seed: str
    """Of the random numbers in it: the run's seed and the number of the draw."""
    form: str
    damages: tuple[str, ...]
    architecture: str
    dtype: str = "bfloat16"
    layers: int = 0
    """Its number of layers; 0 for the architecture's own."""

    def __str__(self) -> str:
        damages = "+".join(self.damages) or _NONE
        fields = (self.seed, self.form, damages, self.architecture, self.dtype, self.layers)
        return " ".join(map(str, fields))


UNDRAWN = Case(seed="0", form="", damages=(), architecture="")
"""For checkpoints of others: the observers of vLLM and transformers do not look at it."""


def parse_case(text: str) -> Case:
    """Read what `str` makes of a case."""
    seed, form, damages, architecture, dtype, layers = text.split()
    return Case(
        seed=seed,
        form=form,
        damages=() if damages == _NONE else tuple(damages.split("+")),
        architecture=architecture,
        dtype=dtype,
        layers=int(layers),
    )


def draw(count: int, seed: int, undamaged: float = _UNDAMAGED_SHARE) -> list[Case]:
    """Draw cases: lists that are shuffled and gone through again and again, so that all occur."""
    random = Random(seed)  # noqa: S311 -- a test needs no secrecy
    num_undamaged = round(len(DAMAGES) * undamaged / (1 - undamaged))
    damages = _cycle(random, [*DAMAGES.values(), *[None] * num_undamaged])
    forms = _Queue(random, list(FORMS))
    architectures = _cycle(random, ARCHITECTURES)
    cases = []
    for number in range(count):
        first = next(damages)
        form = forms.take(lambda name, damage=first: damage is None or damage.fits(FORMS[name]))
        second = _choose_second(random, form, first)
        architecture = next(architectures)
        if first is not None and first.architectures:
            architecture = random.choice(first.architectures)
        cases.append(
            Case(
                seed=f"{seed}:{number}",
                form=form,
                damages=tuple(damage.name for damage in (first, second) if damage),
                architecture=architecture,
                dtype=random.choice(_DTYPES),
            )
        )
    return cases


def _choose_second(random: Random, form: str, first: Damage | None) -> Damage | None:
    if first is None or random.random() > _TWICE_SHARE:
        return None
    fitting = [d for d in DAMAGES.values() if d is not first and d.fits(FORMS[form])]
    return random.choice(fitting)


def _cycle(random: Random, items: Sequence[Item]) -> Iterator[Item]:
    while True:
        yield from random.sample(items, len(items))


class _Queue:
    """Gives the item that fits and was given longest ago."""

    def __init__(self, random: Random, items: Sequence[str]) -> None:
        self._items = random.sample(items, len(items))

    def take(self, fits: Callable[[str], bool]) -> str:
        found = next(item for item in self._items if fits(item))
        self._items.remove(found)
        self._items.append(found)
        return found
