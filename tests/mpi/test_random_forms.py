"""Random calls in all forms of c10d's methods: what gloo computes, in the same run; and wrong ones on some ranks.

All ranks draw the same calls, by the tests' seed (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from groups import on_gloo
from method_calls import FORMS, SEVERAL, WRONG, Call, made, wanted_of
from sampling import count, dice

from torchmpi_plugin.group import forms

pytestmark = pytest.mark.mpi(min_size=2)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
DTYPES = (*INTEGERS, *FLOATS, torch.float16)
#: Of each element; what is split lies along the first dimension.
SHAPES = ((), (), (1,), (4,), (2, 3), (1, 5), (0,))


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor + 1], dim=-1)[..., 0]


def within(tensor: torch.Tensor) -> torch.Tensor:
    """Not at the beginning of its storage."""
    return torch.cat([tensor[:1], tensor, tensor[:1]])[1:-1] if len(tensor) else tensor.clone()


def column(tensor: torch.Tensor) -> torch.Tensor:
    """A column: its elements lie a row apart."""
    return torch.stack([tensor] * 3, dim=1)[:, 1]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": torch.clone,
    "every other": every_other,
    "within": within,
    "a column": column,
}


class Drawn(NamedTuple):
    """How a call of the tables is changed.

    Attributes:
        shape: each element becomes so many.
        by_name: so many of its last arguments are given by their names.
        layouts: of its tensors, in turn.
    """

    case: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    by_name: int
    layouts: tuple[str, ...]


def draw(random: Random) -> Drawn:
    case = random.choice(sorted(name for name in {**FORMS, **SEVERAL} if "sparse" not in name))  # those have no layouts
    dtypes = INTEGERS if "BXOR" in case else (*FLOATS, torch.int64) if "PRODUCT" in case else DTYPES
    layouts = tuple(random.choices(sorted(LAYOUTS), k=3))
    return Drawn(case, random.choice(dtypes), random.choice(SHAPES), random.randrange(5), layouts)


def changed(call: Call, drawn: Drawn, layouts: tuple[str, ...]) -> Call:
    """The call with other tensors, each in the place of one of its own."""
    tensors: dict[int, torch.Tensor] = {}

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            more = torch.arange(torch.Size(drawn.shape).numel()).reshape(drawn.shape)
            spread = tensor.reshape(-1, *[1] * len(drawn.shape)) + more.to(tensor.dtype)
            tensors[id(tensor)] = LAYOUTS[layouts[len(tensors) % len(layouts)]](spread.to(drawn.dtype))
        return tensors[id(tensor)]

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return other(value)
        return [change(each) for each in value] if type(value) is list else value

    named = {name: change(value) for name, value in call.named.items()}
    return Call(call.method, tuple(change(list(call.arguments))), named, change(call.results))


def fits(call: Call, form: forms.Form, given: dict[str, Any]) -> bool:
    """Whether it is the form of this call: mpiplus alone takes a tensor for a list of one."""
    if any(
        kind in ("list", "lists") and isinstance(given.get(name), torch.Tensor) for name, kind in form.kinds.items()
    ):
        return False
    try:
        forms._fit(forms.FORMS[call.method], form, (), given)
    except forms.MisfitError:
        return False
    return True


def named(call: Call, number: int) -> Call:
    """The call with some of its last arguments by their names."""
    for form in forms.FORMS[call.method].forms:
        names = list(form.kinds)[: len(call.arguments)]
        given = dict(zip(names, call.arguments, strict=False))
        if len(given) == len(call.arguments) and fits(call, form, {**given, **call.named}):
            cut = max(len(names) - number, 0)
            last = {name: given[name] for name in names[cut:]}
            return call._replace(arguments=call.arguments[:cut], named={**last, **call.named})
    raise AssertionError(f"{call} is of no form")


def call_of(drawn: Drawn, rank: int, size: int, *layouts: str) -> Call:
    call = {**FORMS, **SEVERAL}[drawn.case](rank, size)
    return named(changed(call, drawn, layouts or drawn.layouts), drawn.by_name)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo of an older one has other forms")
def test_drawn_calls_as_over_gloo(channel, group, world) -> None:
    """gloo's tensors lie plainly: of some others it takes none, or other elements."""
    random, lines = dice("forms"), []
    calls = [draw(random) for _ in range(count("random forms: calls", 1000, 60))]
    place = world.rank, world.size
    wanted = on_gloo(channel, lambda gloo: [wanted_of(gloo, call_of(drawn, *place, "plain")) for drawn in calls])
    for drawn, its in zip(calls, wanted, strict=True):
        exactly = {} if "PRODUCT" in drawn.case else {"rtol": 0, "atol": 0}
        try:
            torch.testing.assert_close(made(group, call_of(drawn, *place)), its, **exactly)
        except AssertionError as error:
            lines.append(f"{drawn}: {error}")
    assert not lines, "\n".join(lines)


# ---- wrong on some ranks ----


def test_wrong_on_some_ranks(group, world) -> None:
    """Nobody else calls: what does not raise at once would wait for them. Then all call, and rightly."""
    random = dice("wrong forms")
    for _ in range(count("random forms: wrong calls", 400, 40)):
        case, number = random.choice(sorted(WRONG)), random.randint(1, world.size)
        kind, words, call = WRONG[case]
        if world.rank in random.sample(range(world.size), number):
            with pytest.raises(kind, match=words):
                call(group, world.size)
        drawn = draw(random)._replace(case="allreduce(tensor=)", dtype=torch.int64)
        total = sum(call_of(drawn, rank, world.size).results[0] for rank in range(world.size))
        assert torch.equal(made(group, call_of(drawn, world.rank, world.size))[0], total), f"after {case}: {drawn}"
