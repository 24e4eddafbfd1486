"""The tests' own memory: what is wrong is seen to be wrong."""

from tests.connectors.memory import BLOCK, Memory, chain, page_is_right

TOKENS = list(range(40))
VALUES = chain(TOKENS)


def test_a_block_is_right_for_its_own_prefix_only() -> None:
    memory = Memory(8)
    assert memory.forward([3, 5, 1], TOKENS[:20], 0) is None
    assert memory.forward([3, 5, 1], TOKENS, 20) is None
    assert memory.is_right(3, VALUES[:BLOCK])
    assert page_is_right(memory.page(5), VALUES[BLOCK : 2 * BLOCK])
    assert not memory.is_right(5, chain([99, *TOKENS[1:]])[BLOCK : 2 * BLOCK])
    memory.array[1, 3, 1, 15, 7] += 1  # one slot of one layer
    assert not memory.is_right(3, VALUES[:BLOCK])


def test_an_overwritten_block_is_noticed_and_spoils_later_ones() -> None:
    memory = Memory(8)
    memory.forward([3, 5], TOKENS[: 2 * BLOCK], 0)
    memory.put(5, memory.page(5) + 1)
    assert memory.forward([3, 5, 1], TOKENS, 2 * BLOCK) == BLOCK
    assert not memory.is_right(1, VALUES[2 * BLOCK :])
