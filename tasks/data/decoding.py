"""Text as its tokens come, in whole characters.

A character may be spread over several tokens (UTF-8 bytes), and what a token looks like depends on the one before it
(SentencePiece drops the blank before the first word). So new tokens are decoded together with those of the last piece
of text, whose own text is then taken away, and nothing is given out while the end is half a character.
"""

from collections.abc import Callable, Sequence

HALF = "�"  # U+FFFD, what decoders write for bytes that are no character (yet)


class TextStream:
    """One text that grows by tokens.

    The pieces joined are the text of all tokens. There is one exception: a tokenizer with byte tokens (`<0xE4>`)
    decodes a run of them as a whole, and after invalid bytes the run's good characters, already given out, would be
    lost; here they stay.

    Args:
        decode: the text of some ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.ids: list[int] = []
        self.text = ""
        self._decode = decode
        self._before: list[int] = []  # the tokens of the last piece
        self._waiting: list[int] = []  # the tokens since

    def push(self, token: int) -> str:
        """Add a token; gives the text that is certain now, often empty."""
        self.ids.append(token)
        self._waiting.append(token)
        piece = self._piece()
        return "" if piece.endswith(HALF) else self._give(piece)

    def end(self) -> str:
        """The rest, when no token follows; a character that was cut off shows as U+FFFD."""
        return self._give(self._piece())

    def _piece(self) -> str:
        before, whole = self._decode(self._before), self._decode(self._before + self._waiting)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._waiting)

    def _give(self, piece: str) -> str:
        if piece:  # tokens without text of their own stay with those that follow: they decide about a blank between
            self._before, self._waiting = self._waiting, []
            self.text += piece
        return piece
