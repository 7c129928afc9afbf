"""Code is read alike on every version of Python: joined instructions, comprehensions put into functions (3.12 and later)."""

import torch

from stratagem._core.counters import counted_names
from stratagem._core.instructions import instructions_of
from stratagem._core.number_writes import numbers_in
from stratagem._core.write_kinds import writes_of


class Base:
    """A class with a result that depends on a number."""

    def scale(self):
        return self.rate


class Counts(Base):
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

    def after_loop(self, xs):
        for x in xs:
            x.mul_(2)
        self.ready = True
        self.ready_before = self.ready

    def by_super(self, loss):
        return loss * super().scale()

    def compared(self, loss):
        return 2 * (self.steps != 0 and loss)

    def keeps(self, x, y):
        a, b = x, y
        self.shadow.mul_(0.9).add_(a, alpha=0.1)
        torch.add(x, b, out=self.result)


def test_a_comprehension_ends_no_statement():
    found = numbers_in(Counts.by_list.__code__)
    assert found.attributes == {"total", "steps"}
    assert (found.moved, found.varying) == ({"steps"}, {"total"})
    assert "weight" in found.used


def test_a_comprehension_without_a_result_is_a_statement():
    found = numbers_in(Counts.by_dict.__code__)
    assert (found.moved, found.varying) == ({"steps"}, frozenset())
    assert counted_names(Counts.by_dict.__code__).attributes == {"steps"}


def test_a_variable_may_have_the_name_of_the_comprehensions_own():
    found = numbers_in(Counts.same_name.__code__)
    assert (found.moved, found.varying) == ({"steps"}, frozenset())


def test_variables_of_a_comprehension_may_be_captured():
    found = numbers_in(Counts.captured.__code__)
    assert (found.moved, found.varying) == (frozenset(), {"steps"})


def test_pairs_of_variables_are_two_variables():
    code = Counts.unpacked.__code__
    assert numbers_in(code).moved >= {"steps"}
    assert {"first", "pair"} <= {one.argval for one in instructions_of(code)}
    assert {"mul_", "add_", "a", "b", "x", "y"} <= {
        one.argval for one in instructions_of(Counts.keeps.__code__)
    }


def test_the_end_of_a_loop_is_no_part_of_the_next_statement():
    assert "ready" in numbers_in(Counts.after_loop.__code__).fixed


def test_results_of_a_base_class_are_used():
    assert "scale" in numbers_in(Counts.by_super.__code__).returned


def test_a_comparison_that_goes_on_is_a_use():
    assert "steps" in numbers_in(Counts.compared.__code__).used


def test_writes_by_name_and_by_keyword_are_found():
    found = writes_of(Counts.keeps.__code__)
    assert {"moves", "adds"} & {*found["shadow"]}
    assert "sets" in found["result"]


def test_a_function_with_many_constants_is_read():
    """Arguments above 255 need an instruction of their own."""
    lines = [f"    y = {number}.5" for number in range(300)]
    source = "\n".join(["def step(counts):", *lines, "    counts['n'] = counts['n'] + 7"])
    held = {}
    exec(source, held)
    assert numbers_in(held["step"].__code__).items == {("", "n", "moved")}
