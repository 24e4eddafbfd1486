"""The tests' own memory: what is wrong is seen to be wrong."""

from tests.connectors.memory import BLOCK, Memory, chain, page_is_right

TOKENS = list(range(40))


def test_what_was_computed_is_right() -> None:
    memory = Memory(8)
    assert memory.forward([3, 5, 1], TOKENS[:20], 0) is None
    assert memory.forward([3, 5, 1], TOKENS, 20) is None
    assert memory.is_right(3, chain(TOKENS)[:BLOCK])
    assert page_is_right(memory.page(5), chain(TOKENS)[BLOCK : 2 * BLOCK])


def test_the_same_tokens_after_others_are_something_else() -> None:
    memory = Memory(8)
    memory.forward([3, 5, 1], TOKENS, 0)
    other = [99, *TOKENS[1:]]
    assert not memory.is_right(5, chain(other)[BLOCK : 2 * BLOCK])


def test_an_overwritten_block_is_noticed_where_it_is_read() -> None:
    memory = Memory(8)
    memory.forward([3, 5, 1], TOKENS, 0)
    memory.forward([5], [7] * BLOCK, 0)
    assert memory.forward([3, 5, 1], [*TOKENS, 1], 40) == BLOCK


def test_what_is_computed_on_a_wrong_prefix_is_wrong() -> None:
    memory = Memory(8)
    memory.forward([3], TOKENS[:BLOCK], 0)
    memory.put(3, memory.page(3) + 1)
    assert memory.forward([3, 4], TOKENS[: 2 * BLOCK], BLOCK) == 0
    assert not memory.is_right(4, chain(TOKENS)[BLOCK : 2 * BLOCK])


def test_one_wrong_slot_of_one_layer_is_enough() -> None:
    memory = Memory(8)
    memory.forward([3], TOKENS[:BLOCK], 0)
    memory.array[1, 3, 1, 15, 7] += 1
    assert not memory.is_right(3, chain(TOKENS)[:BLOCK])
