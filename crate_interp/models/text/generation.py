"""Generation: continues text or tokens with a language model, under TransformerLens' names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.core import checks, errors
from crate_interp.core.run_options import tqdm
from crate_interp.models.layers.context import Past, check_side
from crate_interp.models.text.text_and_tokens import TextMixin, is_text
from crate_interp.models.text.tokenizer import is_hugging_face, separator


@dataclass(frozen=True)
class Options:
    """The options of `generate`; raises ValueError for a number out of range."""

    stop_at_eos: bool = True
    eos_token_id: int | Sequence[int] | None = None
    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    temperature: float = 1.0
    use_past_kv_cache: bool = True
    prepend_bos: bool | None = None
    padding_side: str | None = None
    return_type: str = "input"
    verbose: bool = True
    attention_mask: Tensor | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        checks.non_negative("temperature", self.temperature)
        if self.top_k is not None:
            checks.count("top_k", self.top_k)
        if self.top_p is not None and (not checks.is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={checks.quote(self.top_p)}: give a share in (0, 1], or None.")
        if self.top_k is not None and self.top_p is not None:
            raise ValueError("top_k and top_p both limit the choice of a token: give only one.")
        check_side(self.padding_side)
        checks.one_of("return_type", self.return_type, ("input", "str", "tokens"))

    def choose(self, logits: Float[Tensor, "batch d_vocab"]) -> Int[Tensor, "batch"]:
        """Returns the next token of each row: the likeliest, or one drawn among the likely ones."""
        if not self.do_sample or self.temperature == 0:
            return logits.argmax(dim=-1)
        from transformers import TopKLogitsWarper, TopPLogitsWarper  # slow to import

        logits = logits.float() / self.temperature
        ids: Any = None  # which neither reads
        if self.top_k is not None:
            logits = TopKLogitsWarper(self.top_k)(ids, logits)
        if self.top_p is not None:
            logits = TopPLogitsWarper(self.top_p)(ids, logits)
        chances = logits.softmax(dim=-1)
        return torch.multinomial(chances, 1, replacement=True, generator=self.generator)[:, 0]


class GenerateMixin(TextMixin):
    """`generate` and `generate_stream`, for causal models; CRATE-BERT refuses them.

    Arguments and defaults are those of TransformerLens' bridge. Tokens are drawn from
    softmax(logits / temperature), among the `top_k` likeliest tokens, or among the likeliest tokens
    whose probabilities sum to `top_p`; `do_sample=False` takes the likeliest token. A row ends at
    `eos_token_id` (by default the tokenizer's), and is then filled up with it. It may be a list:
    then a row ends at any of these tokens, and is filled up with the first.

    Texts of unequal length are padded on the left. Token ids with padding need `attention_mask`
    `[batch, pos]`, or `padding_side="left"`, which infers the mask from the pad tokens. Keys and
    values of earlier tokens are kept (`use_past_kv_cache`); beyond n_ctx the last n_ctx tokens are
    read again at each step, as in nanoGPT. Hooks on the model fire. `generator` makes the random
    numbers, which TransformerLens takes from torch's global state. Unlike in TransformerLens,
    giving both `top_k` and `top_p` raises ValueError.
    """

    @torch.no_grad()
    def generate(
        self,
        input: str | Sequence[str] | Tensor = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        *,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str = "input",
        verbose: bool = True,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Returns the input followed by up to `max_new_tokens` tokens: text for text, ids for ids.

            model.generate("A line is", max_new_tokens=5, do_sample=False)

        Args:
            input: A text, a list of texts, or token ids `[batch, pos]`.
            max_new_tokens: The most tokens that follow; 0 gives the input back.
            stop_at_eos: Whether a row ends at `eos_token_id`.
            eos_token_id: The token or tokens that end a row. Default: the tokenizer's.
            do_sample: Whether tokens are drawn; False takes the likeliest token.
            top_k: Draw among this many of the likeliest tokens. Default: all.
            top_p: Draw among the likeliest tokens that have this share of the probability together,
                in (0, 1]. Give only one of top_k and top_p.
            temperature: The number by which logits are divided, at least 0; 0 takes the likeliest
                token.
            use_past_kv_cache: Whether keys and values of earlier tokens are kept.
            prepend_bos: Whether the separator token comes first. Default: as in training.
            padding_side: "left" if the ids have padding on the left; then the mask is inferred.
            return_type: "str" (without special tokens) or "tokens"; "input" means the form of the
                input.
            verbose: Show progress.
            attention_mask: Which token ids are not padding, `[batch, pos]`.
            generator: The random generator. Default: torch's global generator.

        Returns:
            A text or texts, or token ids `[batch, pos + new]`.

        Raises:
            ValueError: For an argument out of range, for padding at the end of a prompt, and if no
                token that ends a row is known (unless `stop_at_eos=False`).
        """
        options = Options(
            stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature, use_past_kv_cache,
            prepend_bos, padding_side, return_type, verbose, attention_mask, generator,
        )  # fmt: skip
        tokens, steps, as_text = _started(self, input, max_new_tokens, options)
        tokens = torch.cat([tokens, *(chosen[:, None] for chosen in steps)], dim=1)
        return _Writer(self).write(tokens, whole=True) if as_text else tokens

    @torch.no_grad()
    def generate_stream(
        self,
        input: str | Sequence[str] | Tensor = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        **options: Any,
    ) -> Iterator[Any]:
        """Yields the input and its continuation in parts, as they are generated.

        Every part but the last has at least `max_tokens_per_yield` tokens; the first begins with
        the input. A part is token ids `[batch, part]`, or text; for several texts it is a list of
        texts. In text, a character made of several tokens is never split. options: as in
        `generate`.
        """
        checks.count("max_tokens_per_yield", max_tokens_per_yield)
        part, steps, as_text = _started(self, input, max_new_tokens, Options(**options))
        writer = _Writer(self) if as_text else None
        for chosen in steps:
            part = torch.cat([part, chosen[:, None]], dim=1)
            if part.shape[1] >= max_tokens_per_yield:
                yield part if writer is None else writer.write(part)
                part = part[:, :0]
        if part.shape[1] and writer is None:
            yield part
        text = "" if writer is None else writer.write(part, whole=True)
        if any(text):
            yield text


def _started(
    model: Any, input: str | Sequence[str] | Tensor, max_new_tokens: int, options: Options
) -> tuple[Int[Tensor, "batch pos"], Iterator[Int[Tensor, "batch"]], bool]:
    """Returns the prompt, the tokens that follow, and whether text is returned.

    Raises ValueError for a bad argument before a token is chosen. Texts are padded on the left.
    """
    if not model.cfg.causal:
        raise ValueError("this model reads a text both ways: it fills masked tokens, writes none.")
    checks.count("max_new_tokens", max_new_tokens, least=0)
    text, mask = is_text(input), options.attention_mask
    if text:
        tokens, real = model._rows(input, options.prepend_bos, "left", truncate=False)
    else:
        side = options.padding_side if mask is None else None
        tokens, real = model._read(input, options.prepend_bos, side, None, None)
    tokens, real = tokens.to(model.cfg.device), real if mask is None else mask
    if real is not None:
        if real.shape != tokens.shape:
            shapes = f"{list(real.shape)}: give shape {list(tokens.shape)}"
            raise ValueError(f"attention_mask has shape {shapes}, one number a token.")
        real = real.to(tokens.device).bool()
        if not bool(real[:, -1].all()):
            raise ValueError("a row of the prompt ends in padding: pad on the left.")
        real = None if bool(real.all()) else real
    ends = _ends(model, options.eos_token_id) if options.stop_at_eos else ()
    as_text = options.return_type == "str" or (options.return_type == "input" and text)
    if as_text:
        model._tokenizer()  # raises now if there is no tokenizer
    return tokens, _steps(model, tokens, real, ends, max_new_tokens, options), as_text


def _steps(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    real: Bool[Tensor, "batch pos"] | None,
    ends: tuple[int, ...],
    max_new_tokens: int,
    options: Options,
) -> Iterator[Int[Tensor, "batch"]]:
    """Yields each row's next token, until all rows have ended. real: None if there is no padding"""
    past, n_ctx = Past(), model.cfg.n_ctx
    over = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    end_ids = torch.tensor(ends, dtype=torch.long, device=tokens.device)
    quiet = not options.verbose
    for step in tqdm(range(max_new_tokens), desc="generate", unit="token", disable=quiet):
        if options.use_past_kv_cache and tokens.shape[1] <= n_ctx:
            mask = None if step else real  # the past already has the mask of its tokens
            logits = model(tokens[:, past.length :], past=past, attention_mask=mask)
        else:
            mask = None if real is None else real[:, -n_ctx:]
            logits = model(tokens[:, -n_ctx:], attention_mask=mask)
        chosen = options.choose(logits[:, -1])
        chosen = chosen.masked_fill(over, ends[0]) if ends else chosen
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        real = None if real is None else F.pad(real, (0, 1), value=True)
        over = over | torch.isin(chosen, end_ids)
        yield chosen
        if bool(over.all()):
            return


def _ends(model: TextMixin, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the tokens that end a text: the caller's, or the tokenizer's."""
    if eos_token_id is None:
        eos_token_id = getattr(model.tokenizer, "eos_token_id", None)
        if eos_token_id is None:
            raise errors.TextError(
                "the tokenizer has no end: give eos_token_id, or stop_at_eos=False."
            )
    ids: Any = eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id]
    return tuple(checks.count("eos_token_id", index, least=0) for index in ids)


class _Writer:
    """Turns parts of token ids into text; an incomplete character waits for its other tokens."""

    def __init__(self, model: TextMixin) -> None:
        self.tokenizer = model._tokenizer()
        self.rows: list[list[int]] = []
        self.written: list[int] = []

    def write(self, part: Int[Tensor, "batch part"], whole: bool = False) -> str | list[str]:
        """Returns the text that tokens complete, without special tokens: a string, or one per row.

        whole: whether the text ends here, so that no incomplete character waits.
        """
        self.rows = self.rows or [[] for _ in part]
        self.written = self.written or [0 for _ in part]
        texts = []
        for row, (ids, new) in enumerate(zip(self.rows, part.tolist(), strict=True)):
            ids += new
            if is_hugging_face(self.tokenizer):
                options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
                text = self.tokenizer.decode(ids, **options)
            else:
                bos = separator(self.tokenizer)
                text = self.tokenizer.decode([index for index in ids if index != bos])
            text = text if whole else text.rstrip("\ufffd")
            texts.append(text[self.written[row] :])
            self.written[row] = max(len(text), self.written[row])
        return texts[0] if len(texts) == 1 else texts
