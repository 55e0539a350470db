"""Every term of the demand counts: drop any one, and some life holds more, or a price is too high (S5).

The arithmetic is read as a syntax tree. A *mutant* is the same arithmetic with one term dropped from a sum, difference or
product, one argument from a `max` or `min`, one element from a set, one rounding left out, or one condition decided beforehand. Each must disagree
with lives lived token by token, or with a figure worked out by hand. A term that no mutant's test missed would be a term too
many.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from kvtide import sizing
from kvtide.plan import KVStoragePlan
from kvtide.sizing import CHECKPOINT_RULES, CheckpointStrategy, ChunkReads, DemandPurpose, demand, held

from .test_request_life import ON_GRID, Case

MakePlan = Callable[..., KVStoragePlan]

HELD_FUNCTIONS = {
    "kept",
    "least_alike",
    "pages",
    "most_pages",
    "most_pages_on_grid",
    "_most_pages_of_a_run",
    "ceil_div",
    "round_up",
}
DEMAND_FUNCTIONS = {
    "step",
    "longest_decoding",
    "_state_slots",
    "_pages",
    "_prefill_pages",
    "_chunk_pages",
    "_aligned_chunk",
    "_begin_of_chunks",
    "_decode_pages",
    "_first_decode_pages",
    "_pages_before_a_chunk",
}

CASE_COUNT = 2500


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes that stand for `node` with one term less."""
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
            yield from (left, right)
        case ast.BinOp(left=left, op=ast.Sub() | ast.FloorDiv()):
            yield left
        case ast.Call(func=ast.Name(id="max" | "min"), args=arguments) if len(arguments) > 1:
            for place in range(len(arguments)):
                others = [argument for index, argument in enumerate(arguments) if index != place]
                yield others[0] if len(others) == 1 else ast.Call(node.func, others, node.keywords)
        case ast.Call(func=ast.Name(id="round_up"), args=arguments):
            yield arguments[0]
        case ast.Set(elts=elements):
            for place in range(len(elements)):
                yield ast.Set([one for index, one in enumerate(elements) if index != place])
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.If(body=body, orelse=orelse):
            for decided in (True, False):
                yield ast.If(ast.Constant(decided), body, orelse)
        case _:
            return


class Swap(ast.NodeTransformer):
    """Puts one node in another's place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def mutants(module: types.ModuleType, functions: set[str]) -> Iterator[tuple[str, ast.Module]]:
    """Each mutant of some functions of a module: its name, and its tree."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for place, function in enumerate(ast.walk(tree)):
        if not isinstance(function, ast.FunctionDef) or function.name not in functions:
            continue
        for inner, node in enumerate(ast.walk(function)):
            for number, replacement in enumerate(replacements(node)):
                texts = [ast.unparse(one).splitlines()[0] for one in (node, replacement)]
                name = f"{function.name}: {texts[0]} → {texts[1]}"
                copied = copy.deepcopy(tree)
                old = nth(ast.walk(nth(ast.walk(copied), place)), inner)
                Swap(old, nth(replacements(old), number)).visit(copied)
                yield name, ast.fix_missing_locations(copied)


def nth(nodes: Iterator[ast.AST], number: int) -> ast.AST:
    return next(itertools.islice(nodes, number, None))


def module_of(tree: ast.Module, original: types.ModuleType, **names: object) -> types.ModuleType:
    """A module of its own with the code of `tree`; `names` replace what it imported."""
    module = types.ModuleType(original.__name__)
    module.__dict__["__file__"] = original.__file__
    exec(compile(tree, "mutant", "exec"), module.__dict__)
    # Enums are compared by identity, so the rows of the rules stay the original's.
    kept = {
        name: getattr(original, name)
        for name in ("DemandPurpose", "OwnWork", "DEMAND_RULES")
        if hasattr(original, name)
    }
    module.__dict__.update(kept | names)
    return module


@attrs.frozen
class Sample:
    """A case, what a life holds at most, and what the unmutated demand says."""

    case: Case
    lived: dict[str, int]
    priced: dict[str, int]


def samples(make_plan: MakePlan) -> list[Sample]:
    """The same cases on every run."""
    chosen = random.Random(3)
    found: list[Sample] = []
    while len(found) < CASE_COUNT:
        case = Case(
            page=chosen.randint(1, 4),
            ratio=chosen.choice([1, 2]),
            window=chosen.randint(1, 9),
            chunk_pages=chosen.choice([1, 2, 4]),
            interval_pages=chosen.choice([1, 2]),
            prompt=chosen.randint(1, 13),
            output=chosen.choice([1, 1, 2, 3, 4, 5, 6]),
            chunk=chosen.randint(1, 8),
            cached_units=chosen.randint(0, 4),
            purpose=chosen.choice(list(DemandPurpose)),
            strategy=chosen.choice(list(CheckpointStrategy)),
            overlap=chosen.random() < 0.4,
            reads=chosen.choice(list(ChunkReads)),
            draft=chosen.choice([0, 0, 1, 2]),
        )
        larger, smaller = max(case.interval, case.attention_chunk), min(case.interval, case.attention_chunk)
        if (case.strategy, case.overlap) not in CHECKPOINT_RULES or larger % smaller:
            continue
        if case.strategy in ON_GRID and case.chunk < case.interval:
            continue
        found.append(Sample(case, case.lived(), case.demand(make_plan)))
    return found


def disagrees(module: types.ModuleType, samples: list[Sample], make_plan: MakePlan) -> bool:
    """Whether a mutant is found out: by a life that holds more, or less where the price is exact."""
    for sample in samples:
        try:
            priced = sample.case.demand(make_plan, module.request_demand)
        except (ArithmeticError, RecursionError, TypeError, ValueError):
            return True
        exact = [name for name in sample.lived if sample.lived[name] == sample.priced[name]]
        if any(priced[name] != sample.lived[name] for name in exact):
            return True
        if any(priced[name] < sample.lived[name] for name in sample.lived):
            return True
    return False


@pytest.mark.requirement("S5")
def test_no_term_of_the_demand_can_be_dropped_unnoticed(make_plan: MakePlan) -> None:
    """An admission guarantee is as good as its smallest term."""
    known = samples(make_plan)
    assert not disagrees(demand, known, make_plan)
    survivors, tried = [], 0
    for name, tree in mutants(held, HELD_FUNCTIONS):
        tried += 1
        changed = module_of(tree, held)
        imported = {
            one: getattr(changed, one) for one in ("HeldBand", "ceil_div", "round_up") if hasattr(demand, one)
        }
        source = ast.parse(Path(str(demand.__file__)).read_text())
        if not disagrees(module_of(source, demand, **imported), known, make_plan):
            survivors.append(name)
    for name, tree in mutants(demand, DEMAND_FUNCTIONS):
        tried += 1
        if not disagrees(module_of(tree, demand), known, make_plan):
            survivors.append(name)
    assert survivors == []
    assert tried > 100
    assert sizing.request_demand is demand.request_demand
