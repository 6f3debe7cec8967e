"""An attempt's calls as a tree of token segments.

Each call's context is its prompt followed by what was sampled. Contexts of one attempt share most of their tokens: a
chain of turns repeats all earlier ones, siblings repeat a prompt, a fork repeats what lies before its departure. The
tree holds every shared prefix once. The recorded prefix pointers say where a call's branch leaves an earlier one; equal
ids that no pointer declares (a retry, a sibling, a client that sent its history anew) are merged as well, by comparing
them. Building it takes time and space linear in the tokens that were recorded.

What was *sampled* is never merged with anything: two calls that sampled the same ids after the same prompt are two
samples, each with log-probabilities and a policy version of its own. So each sampled token lies in exactly one node,
and a node is either context or a stretch of one call's sample.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from longrein.records import Call


class TreeError(ValueError):
    """Recorded calls that contradict each other. The message names the call and the field."""


@dataclass(slots=True)
class Node:
    """A segment of token ids that follows its parent's."""

    tokens: np.ndarray
    """int32 [n]; n = 0 only in the root."""
    start: int
    """Position of the first token in every context that runs through this node."""
    parent: int
    """Index of the parent node; the root's is 0."""
    call: int | None = None
    """Number of the call that sampled this segment; None for context."""
    offset: int = 0
    """Place of the segment within that call's sampled ids."""
    children: dict[int, list[int]] = field(default_factory=dict)
    """First token → child nodes. Several share a first token where calls sampled it separately."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A context that the model ended in: the call that ended there and the nodes from the root down."""

    call: int
    path: tuple[int, ...]


@dataclass
class Tree:
    """All calls of an attempt; node 0 is the root, which is empty."""

    nodes: list[Node]
    ends: dict[int, int]
    """Call number → node at whose end the call's context ends."""

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from just below the root down to `node`."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.nodes[node].parent
        return tuple(reversed(nodes))

    def leaves(self, calls: Collection[int] | None = None) -> list[Leaf]:
        """The contexts of `calls` (all by default) that no other of these calls' contexts runs through.

        In order of call number; of calls whose contexts are equal the first stands for all.
        """
        wanted = sorted(self.ends if calls is None else calls)
        inner = {0}
        for number in wanted:
            node = self.nodes[self.ends[number]].parent
            while node not in inner:
                inner.add(node)
                node = self.nodes[node].parent
        leaves, seen = [], set()
        for number in wanted:
            end = self.ends[number]
            if end not in inner and end not in seen:
                seen.add(end)
                leaves.append(Leaf(number, self.path(end)))
        return leaves

    def tokens(self, path: Sequence[int]) -> np.ndarray:
        """int32 ids of a context."""
        return np.concatenate([np.empty(0, np.int32), *(self.nodes[node].tokens for node in path)])


def build_tree(calls: Sequence[Call]) -> Tree:
    """The tree of one attempt's calls, in order of call number.

    Raises TreeError when a prefix pointer names a call that is not there or more tokens than that call's branch has.
    """
    tree = Tree([Node(np.empty(0, np.int32), 0, 0)], {})
    lengths: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: call.number):
        if call.number in tree.ends:
            raise TreeError(f"call {call.number} is there twice")
        node = _position(tree, call, lengths)
        node = _add_context(tree, node, np.asarray(call.prompt_delta, dtype=np.int32))
        if call.sampled:
            node = _add_node(tree, node, np.asarray(call.sampled, dtype=np.int32), call.number)
        tree.ends[call.number] = node
        lengths[call.number] = call.prompt_length + len(call.sampled)
    return tree


def _position(tree: Tree, call: Call, lengths: dict[int, int]) -> int:
    """The node at whose end `call`'s own prompt tokens begin (cut there if need be)."""
    if call.prompt_length != call.prefix_length + len(call.prompt_delta):
        raise TreeError(
            f"call {call.number}: prompt_length is {call.prompt_length}, but prefix_length {call.prefix_length} and "
            f"{len(call.prompt_delta)} ids of prompt_delta make {call.prefix_length + len(call.prompt_delta)}"
        )
    if call.prefix is None:
        if call.prefix_length:
            raise TreeError(f"call {call.number}: prefix_length is {call.prefix_length} without a prefix call")
        return 0
    if call.prefix not in lengths:
        raise TreeError(f"call {call.number}: its prefix, call {call.prefix}, is not among the calls before it")
    if not 0 <= call.prefix_length <= lengths[call.prefix]:
        raise TreeError(
            f"call {call.number}: prefix_length is {call.prefix_length}, but the branch of call {call.prefix} has "
            f"{lengths[call.prefix]} tokens"
        )
    node = tree.ends[call.prefix]
    while tree.nodes[node].start >= call.prefix_length and node:
        node = tree.nodes[node].parent
    return _cut(tree, node, call.prefix_length - tree.nodes[node].start)


def _add_context(tree: Tree, node: int, tokens: np.ndarray) -> int:
    """Follow `tokens` down from `node`'s end as far as they are there, add the rest; the node they end at."""
    done = 0
    while done < len(tokens):
        rest = tokens[done:]
        best, matched = 0, 0
        for child in tree.nodes[node].children.get(int(rest[0]), ()):
            common = common_prefix(tree.nodes[child].tokens, rest)
            if common > matched:
                best, matched = child, common
        if not matched:
            return _add_node(tree, node, rest, None)
        node = _cut(tree, best, matched)
        done += matched
    return node


def _add_node(tree: Tree, parent: int, tokens: np.ndarray, call: int | None) -> int:
    tree.nodes.append(Node(tokens, tree.nodes[parent].end, parent, call))
    index = len(tree.nodes) - 1
    tree.nodes[parent].children.setdefault(int(tokens[0]), []).append(index)
    return index


def _cut(tree: Tree, index: int, length: int) -> int:
    """Make `index`'s first `length` tokens a node of their own and return it; `index` keeps the rest and its end."""
    lower = tree.nodes[index]
    if length == len(lower.tokens):
        return index
    upper = Node(lower.tokens[:length], lower.start, lower.parent, lower.call, lower.offset)
    tree.nodes.append(upper)
    above = len(tree.nodes) - 1
    siblings = tree.nodes[lower.parent].children[int(lower.tokens[0])]
    siblings[siblings.index(index)] = above
    lower.tokens, lower.start, lower.parent = lower.tokens[length:], lower.start + length, above
    lower.offset += length
    upper.children[int(lower.tokens[0])] = [index]
    return above


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements two integer arrays have in common."""
    length = min(len(a), len(b))
    # Most comparisons end within a few tokens or run to the end: look at a short stretch before the whole.
    for stop in (min(length, 64), length):
        different = np.flatnonzero(a[:stop] != b[:stop])
        if len(different):
            return int(different[0])
    return length
