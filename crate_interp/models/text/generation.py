"""Generation: continues text or tokens with a language model, under TransformerLens' names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.core import checks, progress
from crate_interp.models.hook_points import NamesFilter
from crate_interp.models.layers.context import Past
from crate_interp.models.text.padding import check_side
from crate_interp.models.text.sampling import Sampling
from crate_interp.models.text.stopping import Stops, stops
from crate_interp.models.text.text_and_tokens import TextMixin, is_text
from crate_interp.models.text.tokenizer import is_hugging_face, separator

if TYPE_CHECKING:
    from transformers import StoppingCriteria

_RETURNS = ("input", "str", "tokens")


@dataclass(frozen=True)
class Prompt:
    """The prompt of a generation: token ids, and which of them are real (None means all)."""

    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"] | None
    as_text: bool

    def mask(self, count: int) -> Bool[Tensor, "batch pos"] | None:
        """Returns the attention mask for `count` tokens; generated tokens are real."""
        if self.real is None:
            return None
        new = self.real.new_ones(len(self.real), count - self.real.shape[1])
        return torch.cat([self.real, new], dim=1)


@dataclass(frozen=True)
class Request:
    """The checked arguments of a generation; kind: the returned form, "str" or "tokens"."""

    prompt: Prompt
    kind: str
    sampling: Sampling
    ending: Stops


class GenerateMixin(TextMixin):
    """`generate` and `generate_stream`, for causal models.

    Arguments and defaults are those of TransformerLens' bridge. Tokens are drawn from
    softmax(logits / temperature), among the `top_k` likeliest tokens, or among the likeliest tokens
    whose probabilities sum to `top_p`; `do_sample=False` takes the likeliest token.
    `repetition_penalty` and `freq_penalty` make tokens that already occurred less likely. A row
    ends at `eos_token_id` (by default the tokenizer's), or when `stop_strings` or
    `stopping_criteria` say so. It is then filled up with the end token.

    Texts of unequal length are padded on the left. Token ids with padding need `attention_mask`
    `[batch, pos]`, or `padding_side="left"`, which infers the mask from the pad tokens. Keys and
    values of earlier tokens are kept (`use_past_kv_cache`); beyond n_ctx the last n_ctx tokens are
    read again at each step, as in nanoGPT. Hooks on the model fire. `generator` makes the random
    numbers, which TransformerLens takes from torch's global state. Unlike in TransformerLens,
    penalties ignore padding, and giving both `top_k` and `top_p` raises ValueError.
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
        freq_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str = "input",
        verbose: bool = True,
        output_logits: bool = False,
        return_cache: bool = False,
        return_input_tokens: bool = False,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        pixel_values: Tensor | None = None,
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: "StoppingCriteria | Sequence[StoppingCriteria] | None" = None,
        attention_mask: Tensor | None = None,
        forced_bos_token_id: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Returns the input followed by up to `max_new_tokens` tokens: text for text, ids for ids.

        return_type: "str" (without special tokens) or "tokens"; "input" means the form of the
        input. `output_logits` returns a transformers output instead, with `.sequences` and
        `.logits`, one `[batch, d_vocab]` per step. `return_cache` also returns the cache of a run
        over the result, which must be one row (`names_filter` and `device` as in run_with_cache).
        `return_input_tokens` also returns the tokens of the prompt. Raises an error for arguments
        that a text model does not have.
        """
        _check_possible(input, pixel_values, forced_bos_token_id)
        sampling = Sampling(
            do_sample, top_k, top_p, temperature, freq_penalty, repetition_penalty, generator
        )
        ends = stop_at_eos, eos_token_id, stop_strings, stopping_criteria
        prompt = _prompt(self, input, prepend_bos, padding_side, attention_mask)
        request = _request(self, prompt, return_type, sampling, ends)
        if return_cache:
            names_filter = _to_cache(self, prompt, max_new_tokens, names_filter)
        tokens, logits = prompt.tokens, []
        for chosen, scores in _steps(self, request, max_new_tokens, use_past_kv_cache, verbose):
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            logits += [scores] if output_logits else []
        more: list[Any] = []
        if return_cache:
            model, mask = cast(Any, self), prompt.mask(tokens.shape[1])
            options: Any = {"names_filter": names_filter, "device": device}
            more.append(model.run_with_cache(tokens, attention_mask=mask, **options)[1])
        more += [prompt.tokens] if return_input_tokens else []
        out = _shaped(self, tokens, request.kind, logits if output_logits else None)
        return (out, *more) if more else out

    @torch.no_grad()
    def generate_stream(
        self,
        input: str | Sequence[str] | Tensor = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str = "input",
        verbose: bool = True,
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: "StoppingCriteria | Sequence[StoppingCriteria] | None" = None,
        attention_mask: Tensor | None = None,
        forced_bos_token_id: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Iterator[Any]:
        """Yields the input and its continuation in parts, as they are generated.

        Every part but the last has at least `max_tokens_per_yield` tokens; the first begins with
        the input. A part is token ids `[batch, part]`, or text; for several texts it is a list of
        texts. In text, a character made of several tokens is never split. The other arguments are
        as in `generate`.
        """
        checks.count("max_tokens_per_yield", max_tokens_per_yield)
        _check_possible(input, None, forced_bos_token_id)
        sampling = Sampling(
            do_sample, top_k, top_p, temperature, freq_penalty, repetition_penalty, generator
        )
        ends = stop_at_eos, eos_token_id, stop_strings, stopping_criteria
        prompt = _prompt(self, input, prepend_bos, padding_side, attention_mask)
        request = _request(self, prompt, return_type, sampling, ends)
        text = _Writer(self) if request.kind == "str" else None
        part: Tensor = prompt.tokens
        for chosen, _ in _steps(self, request, max_new_tokens, use_past_kv_cache, verbose):
            part = torch.cat([part, chosen[:, None]], dim=1)
            if part.shape[1] >= max_tokens_per_yield:
                yield part if text is None else text.write(part)
                part = part[:, :0]
        if part.shape[1]:
            yield part if text is None else text.write(part)
        held = None if text is None else text.rest()
        if held:
            yield held


def _steps(
    model: Any, request: Request, max_new_tokens: int, use_past: bool, verbose: bool
) -> Iterator[tuple[Int[Tensor, "batch"], Float[Tensor, "batch d_vocab"]]]:
    """Yields each row's next token and the logits it was chosen from, until all rows have ended."""
    checks.count("max_new_tokens", max_new_tokens, least=0)
    prompt, ending = request.prompt, request.ending
    tokens, past, n_ctx = prompt.tokens, Past(), model.cfg.n_ctx
    over = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    steps = progress.tqdm(range(max_new_tokens), desc="generate", unit="token", disable=not verbose)
    for step in steps:
        mask = prompt.mask(tokens.shape[1])
        if use_past and tokens.shape[1] <= n_ctx:  # the past already has the mask of its tokens
            mask = None if step else mask
            logits = model(tokens[:, past.length :], past=past, attention_mask=mask)
        else:
            cut = None if mask is None else mask[:, -n_ctx:]
            logits = model(tokens[:, -n_ctx:], attention_mask=cut)
        logits = logits[:, -1]
        chosen = request.sampling.choose(logits, tokens, prompt.mask(tokens.shape[1]))
        if ending.active:
            chosen = chosen.masked_fill(over, ending.filler)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        if ending.active:
            over = over | ending.ended(chosen, tokens, logits)
        yield chosen, logits
        if ending.active and bool(over.all()):
            return


def _check_possible(input: object, pixel_values: object, forced_bos_token_id: object) -> None:
    """Raises an error for TransformerLens arguments without a meaning in a causal text model."""
    if isinstance(input, Tensor) and input.is_floating_point():
        raise NotImplementedError(
            "the input holds floats (inputs_embeds), but generate reads token ids or text: give "
            "tokens, or run model(stream, start_at_layer=0) step by step."
        )
    if pixel_values is not None:
        raise NotImplementedError(
            "pixel_values belong to multimodal models, but this model reads text: leave them out."
        )
    if forced_bos_token_id is not None:
        raise ValueError(
            "forced_bos_token_id belongs to encoder-decoder models: append the token to the input."
        )


def _prompt(
    model: TextMixin,
    input: str | Sequence[str] | Tensor,
    prepend_bos: bool | None,
    padding_side: str | None,
    attention_mask: Tensor | None,
) -> Prompt:
    """Returns the prompt of a generation; texts are always padded on the left."""
    check_side(padding_side)
    text = is_text(input)
    if text:
        texts: Any = input
        tokens, mask = model._rows(texts, prepend_bos, "left", truncate=False)
        tokens = tokens.to(model.cfg.device)
    else:
        tokens, mask = model._read(input, prepend_bos, None, None, None)
        tokens = tokens.to(model.cfg.device)
        if padding_side is not None and attention_mask is None:
            mask = model._padding_in(tokens, padding_side, prepend_bos)
    mask = mask if attention_mask is None else attention_mask
    if mask is None:
        return Prompt(tokens, None, text)
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} does not match the prompt shape "
            f"{list(tokens.shape)}: give a number per token of the prompt."
        )
    mask = mask.to(tokens.device)
    if not bool((mask[:, -1] != 0).all()):
        raise ValueError(
            "a row of the prompt ends in padding, but generation continues from its last token: "
            "pad on the left."
        )
    return Prompt(tokens, None if bool(mask.all()) else mask.bool(), text)


def _request(
    model: TextMixin, prompt: Prompt, return_type: str, sampling: Sampling, ends: tuple[Any, ...]
) -> Request:
    """Returns the checked arguments; raises ValueError for a bad argument before work starts."""
    if return_type not in _RETURNS:
        raise ValueError(
            f"return_type={return_type!r}: give 'input', 'str' or 'tokens'. For embeddings, use "
            "model(tokens, stop_at_layer=0)."
        )
    stop_at_eos, eos_token_id, strings, criteria = ends
    ending = stops(model, stop_at_eos, eos_token_id, strings, criteria, len(prompt.tokens))
    kind = return_type
    if kind == "input":
        kind = "str" if prompt.as_text else "tokens"
    if kind == "str":
        model._tokenizer()  # raises now if there is no tokenizer
    return Request(prompt, kind, sampling, ending)


def _to_cache(
    model: Any, prompt: Prompt, max_new_tokens: int, names_filter: NamesFilter
) -> list[str]:
    """Returns the points to cache.

    Raises an error, before work starts, if a cache of the whole result is impossible.
    """
    if len(prompt.tokens) > 1:
        raise NotImplementedError(
            "return_cache=True works for one row, not for a batch: use run_with_cache on the "
            "result."
        )
    count = prompt.tokens.shape[1] + max_new_tokens
    if count > model.cfg.n_ctx:
        raise ValueError(
            f"return_cache=True runs the model once on the whole result, up to {count} tokens, but "
            f"the model takes at most n_ctx={model.cfg.n_ctx}: lower max_new_tokens."
        )
    return model.matching_points(names_filter)


def _shaped(model: TextMixin, tokens: Tensor, kind: str, logits: list[Tensor] | None) -> Any:
    """Returns the generated tokens as tokens, text, or a transformers output."""
    if logits is not None:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        fields: Any = {"sequences": tokens, "logits": tuple(logits)}
        return GenerateDecoderOnlyOutput(**fields)
    if kind == "tokens":
        return tokens
    texts = [_text(model, row) for row in tokens.tolist()]
    return texts[0] if len(texts) == 1 else texts


def _text(model: TextMixin, ids: list[int]) -> str:
    """Returns the text of a row without special tokens."""
    tokenizer = model._tokenizer()
    if is_hugging_face(tokenizer):
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return tokenizer.decode([index for index in ids if index != separator(tokenizer)])


class _Writer:
    """Turns parts of token ids into text; an incomplete character waits for its other tokens."""

    def __init__(self, model: TextMixin) -> None:
        self.model, self.rows, self.written = model, [], []

    def write(self, part: Int[Tensor, "batch part"]) -> str | list[str]:
        """Returns the text that these tokens complete: a string, or one per row of a batch."""
        self.rows = self.rows or [[] for _ in part]
        self.written = self.written or [0 for _ in part]
        for row, ids in zip(self.rows, part.tolist(), strict=True):
            row += ids
        return self._new(hold=True)

    def rest(self) -> str | list[str] | None:
        """Returns the text of a character that is still incomplete, or None."""
        new = self._new(hold=False)
        return new if any(new) else None

    def _new(self, hold: bool) -> str | list[str]:
        parts = []
        for row, ids in enumerate(self.rows):
            text = _text(self.model, ids)
            text = text.rstrip("\ufffd") if hold else text
            parts.append(text[self.written[row] :])
            self.written[row] = max(len(text), self.written[row])
        return parts[0] if len(parts) == 1 else parts
