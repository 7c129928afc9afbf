"""Code is read alike on every version of Python: joined instructions, comprehensions put into functions (3.12 and later)."""

import torch

from stratagem._core.instructions import instructions_of
from stratagem._core.statements import statements_of
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

    def in_blocks(self, xs):
        with torch.no_grad():
            for x in xs:
                try:
                    self.counts["n"] += 1
                except KeyError as error:
                    self.failed = str(error)
        self.steps += 1

    def handled(self, xs):
        for x in xs:
            try:
                x.read()
            except KeyError:
                self.failures += 1
        try:
            xs.close()
        except KeyError:
            self.last += 1
        self.steps += 1

    def swapped(self):
        self.first, self.second = self.second, self.first

    def replaced(self, xs):
        self.shadow = [0.9 * old + x for old, x in zip(self.shadow, xs)]
        self.nested[0]["k"] += 1


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


def test_blocks_end_no_value():
    """The iterator of a loop and the manager of a ``with`` are part of no other statement."""
    found = changes_in(Counts.in_blocks.__code__)
    assert found.items == {(".counts", "n"): {"adds"}}  # in a loop
    assert found.numbers == {".steps": {"moves"}}


def test_a_handler_of_exceptions_is_in_the_loop_of_its_try():
    """From Python 3.12, handlers lie at the end of the code, and jump back from there."""
    assert numbers_of(Counts.handled) == {
        ".failures": {"adds"},
        ".last": {"moves"},
        ".steps": {"moves"},
    }


def test_values_that_wait_for_their_store_are_read_before_it():
    assert changes_in(Counts.swapped.__code__).carried == {".first", ".second"}


def test_a_list_replaced_by_a_comprehension_over_it_is_computed_from_itself():
    found = changes_in(Counts.replaced.__code__)
    assert found.tensors[".shadow"] == {"moves", "binds"}
    assert found.items == {(".nested", "k"): {"moves"}}


def test_a_store_has_the_value_and_the_place():
    store = statements_of(Counts.after_loop.__code__)[-2].root
    assert (store.opname, store.argval) == ("STORE_ATTR", "ready")
    value, place = store.parts
    assert (value.argval, [one.argval for one in value.parts]) == ("+", ["ready", 1])
    assert place.argval == "self"


def test_asynchronous_code_is_not_read():
    """No step awaits it, and its comprehensions have instructions of their own."""

    class Service:
        async def serve(self, xs):
            self.steps += 1
            return [x async for x in xs]

    assert numbers_of(Service.serve) == {}
