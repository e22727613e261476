from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loraserve.memory.kv.block_pool import BlockPool
from loraserve.memory.kv.prefix_cache import Activation, BlockId, PrefixKey, activate_key, extend_key, prefix_root
from loraserve.types import Digest, TenantId

ROOT = prefix_root(TenantId("t"), Digest("b"), "float32")


def publish_all(kv: BlockPool, blocks: list[BlockId], token_ids: list[int], root: PrefixKey = ROOT) -> None:
    parent = root
    for i in range(len(token_ids) // kv.block_size):
        parent = kv.prefix_cache.publish(blocks[i], parent, token_ids[i * kv.block_size : (i + 1) * kv.block_size])


def test_released_prefix_is_found_by_same_tokens():
    kv = BlockPool(8, 4)
    tokens = list(range(10))
    blocks = kv.allocate(3)
    publish_all(kv, blocks, tokens)
    kv.release(blocks)
    found, keys, _ = kv.match_prefix(ROOT, tokens, 9)
    assert found == blocks[:2]
    assert len(keys) == 2
    assert kv.check() == []


def test_a_prefix_ends_at_the_first_other_token():
    kv = BlockPool(8, 4)
    blocks = kv.allocate(2)
    publish_all(kv, blocks, list(range(8)))
    found, *_ = kv.match_prefix(ROOT, [0, 1, 2, 3, 4, 5, 6, 99, 8], 8)
    assert found == blocks[:1]


def test_the_last_token_is_never_a_hit():
    kv = BlockPool(8, 4)
    blocks = kv.allocate(2)
    publish_all(kv, blocks, list(range(8)))
    found, *_ = kv.match_prefix(ROOT, list(range(8)), 7)
    assert found == blocks[:1]


def test_different_prefix_root_finds_no_blocks():
    kv = BlockPool(8, 4)
    blocks = kv.allocate(2)
    publish_all(kv, blocks, list(range(8)))
    for other in (
        prefix_root(TenantId("u"), Digest("b"), "float32"),
        prefix_root(TenantId("t"), Digest("c"), "float32"),
        prefix_root(TenantId("t"), Digest("b"), "bfloat16"),
    ):
        assert kv.match_prefix(other, list(range(9)), 8) == ([], [], 0)


def test_roots_are_framed():
    assert prefix_root(TenantId("ab"), Digest("c"), "f") != prefix_root(TenantId("a"), Digest("bc"), "f")


def test_each_activation_has_distinct_key():
    parents = [ROOT, extend_key(ROOT, [1, 2, 3, 4])]
    activations = [Activation(Digest(adapter), start) for adapter in ("a", "b", "a1") for start in (0, 1, 255, 256)]
    keys = [activate_key(parent, activation) for parent in parents for activation in activations]
    assert len({*parents, *keys}) == len(parents) + len(keys)


def test_prefix_match_ends_where_different_adapter_acts():
    kv = BlockPool(8, 4)
    tokens, activation = list(range(13)), Activation(Digest("a"), 6)
    blocks, keys = kv.allocate(3), []
    for i in range(3):
        parent = kv.prefix_cache.parent_key(ROOT, activation, keys, i)
        keys.append(kv.prefix_cache.publish(blocks[i], parent, tokens[4 * i : 4 * i + 4]))
    found = [
        len(kv.match_prefix(ROOT, tokens, 12, other)[0])
        for other in (
            activation,
            None,
            Activation(Digest("b"), 6),
            Activation(Digest("a"), 5),
            Activation(Digest("a"), 8),
        )
    ]
    assert found == [3, 1, 1, 1, 1]


def test_hash_collision_is_not_a_prefix_hit():
    kv = BlockPool(8, 4)
    blocks = kv.allocate(1)
    publish_all(kv, blocks, [0, 1, 2, 3])
    # as if two contents had one hash
    kv.prefix_cache._by_key[extend_key(ROOT, (9, 9, 9, 9))] = blocks[0]
    assert kv.match_prefix(ROOT, [9, 9, 9, 9, 9], 4) == ([], [], 0)


def test_idle_blocks_are_evicted_from_prefix_end():
    kv = BlockPool(4, 4)
    tokens = list(range(16))
    blocks = kv.allocate(4)
    publish_all(kv, blocks, tokens)
    kv.release(blocks)
    assert kv.allocate(2) is not None
    found, *_ = kv.match_prefix(ROOT, [*tokens, 16], 16)
    assert found == blocks[:2]
    assert kv.check() == []


def test_allocation_never_succeeds_partially():
    kv = BlockPool(4, 4)
    assert kv.allocate(5) is None
    assert kv.num_available == 4
    assert len(kv.allocate(4) or []) == 4


def test_shared_block_frees_after_last_holder():
    kv = BlockPool(4, 4)
    blocks = kv.allocate(1)
    publish_all(kv, blocks, [0, 1, 2, 3])
    again, *_ = kv.match_prefix(ROOT, [0, 1, 2, 3, 4], 4)
    kv.release(blocks)
    assert kv.num_held == 1
    kv.release(again)
    assert kv.num_held == 0


class KVCacheMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, grow and go, in any order."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.kv = BlockPool(num_blocks, 2)
        self.sequences: list[tuple[list[int], list[BlockId]]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def add(self, tokens):
        blocks, *_ = self.kv.match_prefix(ROOT, tokens, len(tokens) - 1)
        more = self.kv.allocate(-(-len(tokens) // 2) - len(blocks))
        if more is None:
            self.kv.release(blocks)
        else:
            self.sequences.append((tokens, blocks + more))

    @rule(data=st.data())
    def publish(self, data):
        if self.sequences:
            tokens, blocks = data.draw(st.sampled_from(self.sequences))
            publish_all(self.kv, blocks, tokens)

    @rule(data=st.data())
    def end(self, data):
        if self.sequences:
            index = data.draw(st.integers(0, len(self.sequences) - 1))
            self.kv.release(self.sequences.pop(index)[1])

    @invariant()
    def holds(self):
        assert self.kv.check() == []

    def teardown(self):
        for _, blocks in self.sequences:
            self.kv.release(blocks)
        assert self.kv.num_held == 0


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**40), min_size=1), st.lists(st.integers(0, 2**40), min_size=1))
def test_keys_of_different_contents_differ(a, b):
    assert (extend_key(ROOT, a) == extend_key(ROOT, b)) == (a == b)
