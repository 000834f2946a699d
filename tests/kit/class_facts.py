"""Facts about linears as text, which `CreatedLinear.parse` reads."""

from fp8calib.engines.facts.classes import CreatedLinear


def spell_fact(created: CreatedLinear) -> str:
    """Give the text of what a class does with a linear."""
    head = f"{created.state} {created.kind} {created.path}"
    if created.parts == (created.path,):
        return head
    parent = created.path.rpartition(".")[0]
    names = [
        each.removeprefix(parent) if each.rpartition(".")[0] == parent and parent else each
        for each in created.parts
    ]
    return f"{head}: {' '.join(names)}"
