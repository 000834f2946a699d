"""What the files of facts say is what the engines' packages show."""

import pytest

from tests.real_engines.package import UnavailableError
from tests.real_engines.read_engines import SOURCES, FactsFile, Source, open_entry

by_engine = pytest.mark.parametrize("source", SOURCES, ids=lambda each: each.key)


def open_file(source: Source) -> FactsFile:
    """Open the facts of an engine; skip the test where a package cannot be had."""
    file = FactsFile(source, source.path.read_text())
    try:
        for each in file.releases:
            open_entry(each)
    except UnavailableError as error:
        pytest.skip(str(error))
    return file


@by_engine
def test_reading_every_release_again_changes_nothing(source: Source) -> None:
    file = open_file(source)

    for each in [*file.releases]:
        file.read(each["package"], each["version"])

    assert file.make_text() == source.path.read_text()


@by_engine
def test_the_newest_release_is_added_as_it_was(source: Source) -> None:
    file = open_file(source)
    newest = file.releases[-1]

    file.remove(newest["version"])
    removed = file.make_text()
    file.read(newest["package"], newest["version"])

    assert file.make_text() == source.path.read_text() != removed
