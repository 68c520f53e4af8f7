"""The pages of a key-value cache: which request holds which, and which tokens they store. Pure: no torch."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    """A full page of tokens, after the tokens of its parents."""

    parent: _Node | None
    key: bytes
    """The token ids of the page, as bytes."""
    holders: dict[Hashable, None]
    """The requests that use it, in the order in which they came. Who holds a page also holds its parents."""
    children: dict[bytes, _Node] = field(default_factory=dict)
    page: int = -1
    ready: bool = False
    """Whether its keys and values are computed. Until then, its only holder is the request that computes it."""


@dataclass(slots=True)
class _HeldPages:
    """The pages of one request."""

    path: list[_Node]
    """The first pages of the table, which others may use."""
    table: list[int]
    ready: int
    """How many of the path are computed."""
    closed: bool
    """Whether later pages are private, because another request has pages of the same tokens."""


class PrefixCache:
    """Gives pages to requests; requests whose prompts begin with the same tokens use the same pages.

    Only full pages are shared, and a full page never changes: nothing is ever copied. Pages are compared by their
    tokens, not by a hash. A page that no request holds keeps its tokens until its room is needed; the page that was
    released first goes first, children before parents.
    """

    def __init__(self, pages: Iterable[int], page_tokens: int, share: bool) -> None:
        self.tables: dict[Hashable, list[int]] = {}
        """The pages of each request, in the order of its tokens."""
        self._free = list(pages)
        self._size = page_tokens
        self._share = share
        self._root = _Node(None, b"", {})
        self._held: dict[Hashable, _HeldPages] = {}
        self._idle: dict[_Node, None] = {}
        """Pages that no request holds, least recently used first."""

    @property
    def available(self) -> int:
        """Pages that no request holds."""
        return len(self._free) + len(self._idle)

    def start(self, request: Hashable, tokens: Sequence[int]) -> int | None:
        """Give a request the stored pages of its prompt, and note that it computes the others.

        Returns how many tokens are stored: at most all but the last, which is needed for the next token. None if
        another request computes the next page: it can be shared after that request's next steps.
        """
        path = list(self._found(tokens))
        if path and not path[-1].ready:
            return None
        for node in path:
            if not node.holders:
                del self._idle[node]
            node.holders[request] = None
        held = _HeldPages(path, [node.page for node in path], len(path), closed=not self._share)
        self._held[request] = held
        self.tables[request] = held.table
        found = len(path) * self._size
        for key in self._keys(tokens, found, len(tokens)):
            if held.closed or not self._append(held, request, key):
                break
        return found

    def grow(self, request: Hashable, tokens: int) -> bool:
        """Give a request pages for `tokens` tokens; False, with the pages it has, if there are not enough."""
        held = self._held[request]
        missing = -(-tokens // self._size) - len(held.table)
        if missing > self.available:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._evict()
            if len(held.table) < len(held.path):
                held.path[len(held.table)].page = page
            held.table.append(page)
        return True

    def completes(self, request: Hashable, count: int) -> bool:
        """Whether others may use more pages of a request if its first `count` tokens are computed."""
        held = self._held[request]
        return count // self._size > held.ready and (not held.closed or held.ready < len(held.path))

    def computed(self, request: Hashable, tokens: Sequence[int], count: int) -> None:
        """The keys and values of the first `count` tokens of a request are computed: others may use its full pages."""
        held = self._held[request]
        for key in self._keys(tokens, held.ready * self._size, count):
            if held.ready == len(held.path) and (held.closed or not self._append(held, request, key)):
                return
            node = held.path[held.ready]
            node.page, node.ready = held.table[held.ready], True
            held.ready += 1

    def release(self, request: Hashable) -> None:
        """Take all pages of a request; an unknown request is ignored."""
        held = self._held.pop(request, None)
        if held is None:
            return
        del self.tables[request]
        self._free += held.table[len(held.path) :]
        for node in reversed(held.path):
            del node.holders[request]
            if node.ready and not node.holders:
                self._idle[node] = None
            elif not node.ready:
                self._forget(node)
                self._free += [node.page] if node.page >= 0 else []

    def shared(self, request: Hashable) -> int:
        """How many tokens' pages of a request were already held when it came."""
        held = self._held.get(request)
        if held is None:
            return 0
        return bisect_left(held.path, True, key=lambda node: next(iter(node.holders)) == request) * self._size

    def held(self, tokens: Sequence[int]) -> int:
        """How many first tokens of a prompt are in pages that requests hold, or compute."""
        pages = 0
        for node in self._found(tokens):
            if not node.holders:
                break
            pages += 1
        return pages * self._size

    def _found(self, tokens: Sequence[int]) -> Iterator[_Node]:
        """The pages of a prompt that are stored, and the first that another request computes."""
        node = self._root
        for key in self._keys(tokens, 0, len(tokens) - 1) if self._share else ():
            child = node.children.get(key)
            if child is None:
                return
            yield child
            node = child

    def _keys(self, tokens: Sequence[int], start: int, end: int) -> Iterator[bytes]:
        """The full pages from a page's first token on."""
        for last in range(start + self._size, end + 1, self._size):
            yield array("i", tokens[last - self._size : last]).tobytes()

    def _append(self, held: _HeldPages, request: Hashable, key: bytes) -> bool:
        """Add a page to those that others may use; False if there is one of the same tokens."""
        parent = held.path[-1] if held.path else self._root
        if key in parent.children:
            held.closed = True
            return False
        node = _Node(parent, key, {request: None})
        parent.children[key] = node
        held.path.append(node)
        return True

    def _evict(self) -> int:
        """Forget the page that was released first, which has no children."""
        node = next(iter(self._idle))
        del self._idle[node]
        self._forget(node)
        return node.page

    def _forget(self, node: _Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.key]
