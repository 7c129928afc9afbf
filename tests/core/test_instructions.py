"""Code is read alike on every version of Python: joined instructions, comprehensions put into functions (3.12 and later)."""

import torch

from stratagem._core.instructions import instructions_of
from stratagem._core.step_code import changes_in


class Counts:
    """Statements that newer versions of Python compile to other instructions."""

    def by_list(self, xs):
        self.total = self.total + sum([x * self.weight for x in xs])
        self.steps += 1

    def by_dict(self, xs):
        {x: self.seen.append(x) for x in xs if x or self.limit}
        self.steps += 1

    def same_name(self, x):
        x = [x.float() for x in x]
        self.steps += 1
        return x

    def captured(self, xs):
        calls = [lambda: x for x in xs]
        self.steps += len(calls)

    def unpacked(self, pair):
        first, self.second = pair
        self.steps, self.other = self.steps + 1, first

    def conditional(self, x):
        self.steps += 1 if x else 2
        self.best = x if x > 2 * self.best else self.best
        self.loss = self.first and x

    def after_loop(self, xs):
        for x in xs:
            x.mul_(2)
        self.ready = self.ready + 1

    def keeps(self, x, y):
        a, b = x, y
        self.shadow.mul_(0.9).add_(a, alpha=0.1)
        torch.add(x, b, out=self.result)


def numbers_of(function):
    return {name: {*kinds} for name, kinds in changes_in(function.__code__).numbers.items()}


def test_a_comprehension_ends_no_statement():
    assert numbers_of(Counts.by_list) == {".total": {"adds"}, ".steps": {"moves"}}


def test_a_comprehension_without_a_result_is_a_statement():
    assert numbers_of(Counts.by_dict) == {".steps": {"moves"}}
    assert changes_in(Counts.by_dict.__code__).counted == {".steps"}


def test_a_variable_may_have_the_name_of_the_comprehensions_own():
    assert numbers_of(Counts.same_name) == {".steps": {"moves"}}


def test_variables_of_a_comprehension_may_be_captured():
    assert numbers_of(Counts.captured) == {".steps": {"adds"}}


def test_pairs_of_variables_are_two_variables():
    code = Counts.unpacked.__code__
    assert numbers_of(Counts.unpacked)[".steps"] == {"moves"}
    assert {"first", "pair"} <= {one.argval for one in instructions_of(code)}
    assert {"mul_", "add_", "a", "b", "x", "y"} <= {
        one.argval for one in instructions_of(Counts.keeps.__code__)
    }


def test_a_conditional_expression_ends_no_statement():
    assert numbers_of(Counts.conditional) == {".steps": {"varies"}, ".best": {"varies"}}
    assert changes_in(Counts.conditional.__code__).counted == {".steps"}


def test_the_end_of_a_loop_is_no_part_of_the_next_statement():
    assert numbers_of(Counts.after_loop) == {".ready": {"moves"}}


def test_writes_by_name_and_by_keyword_are_found():
    found = changes_in(Counts.keeps.__code__).tensors
    assert {"moves", "adds"} & {*found[".shadow"]}
    assert "sets" in found[".result"]


def test_a_function_with_many_constants_is_read():
    """Arguments above 255 need an instruction of their own."""
    lines = [f"    y = {number}.5" for number in range(300)]
    source = "\n".join(["def step(counts):", *lines, "    counts['n'] = counts['n'] + 7"])
    held = {}
    exec(source, held)
    assert changes_in(held["step"].__code__).items == {("", "n"): {"moves"}}
