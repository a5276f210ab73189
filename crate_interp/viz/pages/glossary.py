"""The words of the pages: what each means, shown where a page first uses it."""

import html
import re
from collections.abc import Iterable

# word -> its other forms, and what it means; docs list the same words
TERMS: dict[str, tuple[tuple[str, ...], str]] = {
    "ablation": (("ablated",), "A part of the network is taken out, by its mean or by zero, to see "
                 "what the answers lose."),
    "audit": (("audits",), "Tests in every layer of what the papers claim of it, beside nulls."),
    "AoT": ((), "Attention-only transformer: the attention of CRATE, with no sparse step."),
    "atom": (("atoms",), "One entry of a code, with its column of the dictionary D: a direction "
             "that the layer can write. In a ToST or a GPT, whose layers have an MLP and no "
             "dictionary, a neuron of the MLP with its column of the second matrix."),
    "attribution": (("attributions",), "To first order, how much an answer would change if a part "
                    "were set to 0."),
    "AUC": ((), "Area under the ROC curve: the chance that an atom is larger where its name fits "
            "than where it does not; .5 is chance."),
    "by construction": ((), "An ideal layer, built as the derivation says, misses the bound too: "
                        "the bound asks for more than the design gives."),
    "black box": (("black boxes",), "A network whose layers have no subspaces or codes to measure, "
                  "such as a ViT behind a bridge."),
    "CBT": ((), "Contract-and-broadcast transformer: heads read few representatives of tokens."),
    "ceiling": (("ceilings",), "A bound that no value on the same tokens passes. For a rate it is "
                "a Lagrange dual, which may be out of reach."),
    "CLS": ((), "A token before the patches that stands for the whole image; the classifier reads "
            "it."),
    "code": (("codes",), "What a layer makes of a token: U_k^T z in a head, or the sparse entries "
             "over the atoms of D."),
    "concentration": ((), "How few entries of a code carry an answer, beside random axes."),
    "coding rate": (("coding rates",), "How many nats the tokens cost if they are coded together "
                    "at precision eps."),
    "control": (("controls",), "The same measurement with one part replaced by a random part of "
                "the same singular values."),
    "CRATE": ((), "Coding rate transformer: each layer is one step of compression and one of "
              "sparsification."),
    "dictionary": (("dictionaries",), "The matrix D of the sparse step; its columns are atoms."),
    "eps": ((), "The precision at which a coding rate is measured: noise below eps costs no nats."),
    "excess": ((), "The number minus what its null gives on the same samples."),
    "frame": (("frames",), "How tokens are normalised before a rate is measured: as they are "
              "(stream), through LayerNorm (read), or with |Z| at a fixed norm (unit)."),
    "gain": ((), "The number minus what the same layer gives with a random matrix in place of its "
             "own."),
    "head": (("heads",), "One of the parallel parts of an attention; L3H1 is head 1 of layer 3, "
             "both counted from 0."),
    "hook point": (("hook points",), "A named place in the network at which activations are "
                   "read or changed."),
    "Hoyer": ((), "A sparsity between 0 (all entries alike) and 1 (one entry), from the ratio of "
              "l1 to l2 norm."),
    "incoherent": ((), "Subspaces of different heads that hardly overlap."),
    "influence": ((), "The share of an answer that passes through a node, over all paths: the sum "
                  "of products of the edges' shares along each path."),
    "ISTA": ((), "CRATE's sparse step: one step towards a sparse code in the dictionary D."),
    "Jaccard index": ((), "Overlap over union of two masks: 1 is the same mask, 0 no overlap."),
    "kept": ((), "The claim holds: its interval lies within its bounds, and it is better than its "
             "nulls."),
    "lasso": ((), "Half the squared error of D a, plus lambda times the sum of the entries of a: "
              "what the sparse step lowers."),
    "logit lens": ((), "What the last layer's readout would answer from an earlier layer's "
                   "stream."),
    "MSSA": ((), "CRATE's attention: query, key and value of a head are one code U_k^T z."),
    "native axes": ((), "The axes of a code as it is stored: its neurons or atoms."),
    "nats": ((), "Units of information, by the natural logarithm: 1 nat is 1.44 bits."),
    "Neumann form": ((), "The exact gradient step of the rate, of which MSSA is the first "
                     "terms of a series."),
    "null": (("nulls",), "The same measurement where there is nothing to find, such as a shuffled "
             "update. A number means something beyond its null."),
    "output map": (("output maps",), "W_O, the matrix by which heads write into the stream."),
    "patch": (("patches",), "A square of the image; the network sees each as one token."),
    "principal axes": ((), "The axes along which a code varies most (PCA), in place of its own."),
    "probe": (("probes",), "A function from activations to numbers of each layer and head."),
    "R^c": ((), "The coding rate against the subspaces: how many nats the tokens cost if each head "
            "codes its part. Lower is more compressed."),
    "remainder": ((), "What is missing between the answer and a sum of slopes: how far the network "
                  "is from linear."),
    "residual": (("residuals",), "What is left of a token when its code has been decoded."),
    "shuffled": ((), "In random order: the tokens of an update, or the entries of a weight "
                 "matrix. As large as before, without what was learned."),
    "skip": ((), "The skip connection: what a token carries past a layer's heads."),
    "sweep": (("sweeps",), "Probes over a data set, batch by batch, with no full cache in memory."),
    "stream": (("residual stream",), "The vectors Z that layers read and write, one for each "
               "token."),
    "subspace": (("subspaces",), "The directions U_k that a head codes tokens in."),
    "support": ((), "How many tokens a head looks at: 1 over the sum of its squared shares."),
    "ToST": ((), "Token statistics transformer: attention by second moments, without a pattern."),
    "token": (("tokens",), "One vector of the stream: a patch, CLS, or a piece of text."),
    "twin": (("twins",), "The same architecture with random weights."),
    "undecided": ((), "The data does not tell: the interval holds both answers."),
    "untrained": ((), "The same architecture with the weights that a training starts from, drawn "
                  "anew."),
    "white-box": ((), "Of a network: each layer comes from an objective that can be measured."),
    "window": (("windows",), "A stretch of tokens that the model reads at once: one sample of a "
               "text."),
    "zeros in the code": (("zeros",), "Entries of the sparse code that are exactly 0."),
}  # fmt: skip
_SKIPPED = re.compile(
    r"<(script|style|svg|title|table|button|label|legend|select|option|pre|code|summary|h1|h2|h3|a|iframe|textarea|dl)\b"
    r".*?</\1>",
    re.DOTALL,
)
_TAG = re.compile(r"<[^>]*>")
_RATE = "R<sup>c</sup>"  # R^c on a page


def forms() -> dict[str, str]:
    """Returns each form of each word, and the word."""
    return {form: word for word, (others, _) in TERMS.items() for form in (word, *others)}


def finder(known: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds these words, the longest that fits at each place."""
    longest = sorted(known, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest))})(?![\w-])")


def explained(document: str) -> str:
    """Returns an HTML page in which the first use of each word of `TERMS` shows its meaning."""
    start = document.find("<body")
    known = forms()
    known.pop("R^c")  # `_with_rate` finds it
    found = finder(known)
    seen: set[str] = set()

    def wrapped(match: re.Match[str]) -> str:
        word = known[match[0]]
        if word in seen:
            return match[0]
        seen.add(word)
        return f'<abbr title="{html.escape(TERMS[word][1])}">{match[0]}</abbr>'

    document = _with_rate(document, start)
    parts, at = [document[:start]], start
    for piece in _pieces(document, start):
        text, piece_end = piece
        parts += [found.sub(wrapped, text), document[at + len(text) : piece_end]]
        at = piece_end
    return "".join(parts) + document[at:]


def _with_rate(document: str, start: int) -> str:
    """Returns a page in which R^c is explained where a paragraph first has it."""
    at = document.find(_RATE, start)
    while at >= 0 and document.rfind("<p", start, at) <= document.rfind("</p>", start, at):
        at = document.find(_RATE, at + 1)
    if at < 0:
        return document
    shown = f'<abbr title="{html.escape(TERMS["R^c"][1])}">{_RATE}</abbr>'
    return f"{document[:at]}{shown}{document[at + len(_RATE) :]}"


def _pieces(document: str, start: int) -> list[tuple[str, int]]:
    """Returns each text outside tags with the place at which the markup after it ends."""
    found, at = [], start
    while at < len(document):
        tag = _TAG.search(document, at)
        if tag is None:
            break
        skipped = _SKIPPED.match(document, tag.start())
        end = (skipped or tag).end()
        found.append((document[at : tag.start()], end))
        at = end
    return found
