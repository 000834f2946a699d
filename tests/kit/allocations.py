"""What torch's allocator hands out on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


@contextmanager
def peak_allocated(peaks: list[int]) -> Iterator[None]:
    """Append the most bytes that were held at once, of those taken while the context is open."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        yield
    events = found.profiler.kineto_results.events()
    sizes = (event.nbytes() for event in events if event.name() == "[memory]")
    peaks.append(max(accumulate(sizes), default=0))
