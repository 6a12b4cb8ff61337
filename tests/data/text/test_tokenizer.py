"""BPE and WordPiece: merges worked out by hand, round trips, reproducible training, BERT's vocabulary files."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.base.errors import CheckpointError, ConfigError, DataError
from vitrail.data.text import tokenizer
from vitrail.data.text.pairs import open_pairs
from vitrail.data.text.tokenizer import END, PAD, PARALLELISM, SPECIAL_TOKENS, START, UNKNOWN, TextTokenizer

pytest.importorskip("tokenizers")
KINDS = ("bpe", "wordpiece")
IMPORT = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_tokenizer import train_on_tatoeba"
# Sennrich's example: low 5 times, lower 2, newest 6, widest 3
CORPUS = ["low low low low low", "lower lower newest newest newest newest newest newest", "widest widest widest"]
# The letters have the ids 4 to 14 in the order d e i l n o r s t w ▁. The most frequent pair is merged; of equally
# frequent ones that with the lowest ids, and a new piece gets the next id. Counts at the time of the merge:
MERGES = [
    ("e", "s"),  # 9 in newest, widest; so has s t, but e is before s
    ("es", "t"),  # 9
    ("l", "o"),  # 7 in low, lower; so have o w and ▁ l
    ("▁", "lo"),  # 7; so has lo w, but ▁ has the id 14 and lo 17
    ("▁lo", "w"),  # 7
    ("e", "w"),  # 6 in newest; so have ▁ n, n e and w est
    ("n", "ew"),  # 6
    ("▁", "new"),  # 6
    ("▁new", "est"),  # 6
    ("d", "est"),  # 3 in widest; so have ▁ w, w i and i d
    ("i", "dest"),  # 3
    ("w", "idest"),  # 3
    ("▁", "widest"),  # 3
    ("e", "r"),  # 2 in lower; so has ▁low e
    ("▁low", "er"),  # 2
]


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest) -> TextTokenizer:
    return train_on_tatoeba(request.param)


def train_on_tatoeba(kind: str, vocabulary: int = 800) -> TextTokenizer:
    train = open_pairs("tatoeba").train
    return TextTokenizer.train(kind, [*train.sources[:2000], *train.targets[:2000]], vocabulary)


def test_merges_equal_those_worked_out_by_hand() -> None:
    letters = [*sorted({*"low", *"lower", *"newest", *"widest"}), "▁"]
    expected = [*SPECIAL_TOKENS, *letters, *("".join(pair) for pair in MERGES)]
    assert TextTokenizer.train_bpe(CORPUS, 100).names == expected  # pairs that occur once are not merged
    for count in range(len(MERGES) + 1):
        assert TextTokenizer.train_bpe(CORPUS, 15 + count).names == expected[: 15 + count]
    four = TextTokenizer.train_bpe(CORPUS, 15 + 4)
    assert show(four, "lowest newer") == ["▁lo", "w", "est", "▁", "n", "e", "w", "e", "r"]


def show(tokenizer: TextTokenizer, text: str) -> list[str]:
    return [tokenizer.names[token] for token in tokenizer.encode([text])[0]]


def test_wordpiece_takes_the_longest_pieces_from_the_left() -> None:
    tokenizer = TextTokenizer.train_wordpiece(CORPUS, 100)
    assert show(tokenizer, "lower newest") == ["▁lower", "▁newest"]
    assert show(tokenizer, "lowest") == ["▁low", "##est"]
    assert show(tokenizer, "lowx low") == ["<unk>", "▁low"]
    assert [piece.text for piece in tokenizer.pieces("lowest")] == ["low", "est"]
    assert tokenizer.decode(tokenizer.encode(["lowest lower"])[0]) == "lowest lower"


def test_special_tokens_have_the_first_ids(trained: TextTokenizer) -> None:
    assert (trained.pad, trained.start, trained.end, trained.unknown) == (PAD, START, END, UNKNOWN) == (0, 1, 2, 3)
    assert trained.names[:4] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert trained.vocabulary == 800 == len(trained.names)


def test_special_tokens_are_not_made_from_text(trained: TextTokenizer) -> None:
    text = "<s> </s> <pad> [SEP]"
    assert not {PAD, START, END} & {*trained.encode([text])[0]}
    again = TextTokenizer.from_json(trained.to_json())
    assert again.encode([text]) == trained.encode([text])
    many = TextTokenizer.train_bpe(["a</s>b </s> <s> <unk>"] * 9, 300)
    assert not {PAD, START, END, UNKNOWN} & {*many.encode(["a</s>b </s> <s> <unk>"])[0]}
    assert many.decode(many.encode(["a</s>b </s>"])[0]) == "a</s>b </s>"


def test_text_survives(trained: TextTokenizer) -> None:
    val = open_pairs("tatoeba").val
    texts = [*val.sources, *val.targets]
    rows = trained.encode(texts)
    known = [(text, row) for text, row in zip(texts, rows, strict=True) if UNKNOWN not in row]
    assert len(known) > 0.95 * len(texts)
    for text, row in known:
        assert trained.decode([START, *row, END, PAD, PAD]) == " ".join(normalize("NFC", text).split())


ALPHABET = "aeiouäöü ABC.,!?#▁'’\"()<>/-0123\t\n\u00a0\u2028\u0301\u0308"


@pytest.fixture(scope="module")
def small() -> dict[str, TextTokenizer]:
    """Trained on text with every character of ALPHABET and their compositions, inside and at the start of words."""
    letters = normalize("NFC", "".join(f"{letter}\u0301 {letter}\u0308 " for letter in "aeiouäöüABC")) + ALPHABET
    texts = ["".join(f"{letter}x{letter} {letter}" for letter in letters), 'auo# aua (aba) "Aa" ##a 12.30 ä#ä'] * 3
    return {kind: TextTokenizer.train(kind, texts, 400) for kind in KINDS}


@given(text=st.text(ALPHABET, max_size=40))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_encoded_is_decoded(small: dict[str, TextTokenizer], kind: str, text: str) -> None:
    """White space, and the mark for it, becomes one space, and none at the ends."""
    tokenizer = small[kind]
    (row,) = tokenizer.encode([text])
    if UNKNOWN not in row:
        assert tokenizer.decode(row) == " ".join(normalize("NFC", text).replace("▁", " ").split())
    else:
        assert "\u0301" in text or "\u0308" in text or kind == "wordpiece"
    pieces = tokenizer.pieces(text)
    assert [piece.id for piece in pieces] == row
    for piece, after in pairwise(pieces):
        assert 0 <= piece.start <= piece.end <= after.start
    covered = "".join(text[piece.start : piece.end] for piece in pieces)
    assert [each for each in covered if not each.isspace() and each != "▁"] == [
        each for each in text if not each.isspace() and each != "▁"
    ]


def test_pieces_are_shown_without_marks_and_with_their_places(trained: TextTokenizer) -> None:
    text = "  Das ist's,  Tom!"
    pieces = trained.pieces(text)
    assert "".join(piece.text for piece in pieces) == "Dasist's,Tom!"
    assert all(text[piece.start : piece.end] == piece.text for piece in pieces)
    words = [number for number, piece in enumerate(pieces) if piece.starts_word]
    assert [text[pieces[number].start :].split()[0] for number in words] == ["Das", "ist's,", "Tom!"]
    (unknown,) = (piece for piece in trained.pieces("Tom 漢 Tom") if piece.id == UNKNOWN)
    assert (unknown.text, unknown.start, unknown.end, unknown.starts_word) == ("漢", 4, 5, True)
    assert [trained.show_token(token) for token in range(4)] == [*SPECIAL_TOKENS]
    assert trained.pieces("") == []
    assert trained.pieces("a\u0308")[-1].end == 2  # an accent of its own


def test_punctuation_is_not_joined_to_words(trained: TextTokenizer) -> None:
    for name in trained.names[4:]:
        inner = name.removeprefix("##").removeprefix("▁")
        assert len(inner) < 2 or inner.replace("'", "").replace("’", "").isalnum(), name


def test_characters_that_were_never_seen_are_unknown_and_counted(trained: TextTokenizer) -> None:
    assert sum(row.count(trained.unknown) for row in trained.encode(["Tom ist hier.", "Tom 漢 字"])) == 2
    assert trained.decode(trained.encode(["Tom 漢"])[0]) in ("Tom <unk>", "Tom<unk>")


def test_training_is_reproducible_in_other_processes() -> None:
    """Also with another hash seed, and with several threads."""
    program = f"{IMPORT}; print(*(train_on_tatoeba(kind).to_json() for kind in {KINDS}), sep='', end='')"
    expected = "".join(train_on_tatoeba(kind).to_json() for kind in KINDS)
    for hash_seed, parallel in (("1", "true"), ("2", "false")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, PARALLELISM: parallel, "PYTHONUTF8": "1"}
        line = [sys.executable, "-c", program]
        done = subprocess.run(line, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected


def test_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARALLELISM, raising=False)
    TextTokenizer.train_bpe(CORPUS, 30)
    assert PARALLELISM not in os.environ
    monkeypatch.setenv(PARALLELISM, "true")
    TextTokenizer.train_bpe(CORPUS, 30)
    assert os.environ[PARALLELISM] == "true"


def test_a_fork_after_training_and_encoding_prints_nothing() -> None:
    program = (
        f"{IMPORT}; import os; train_on_tatoeba('bpe').encode(['Tom ist hier.'] * 100); "
        "child = os.fork(); child and os.waitpid(child, 0)"
    )
    env = {name: value for name, value in os.environ.items() if name != PARALLELISM}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_restores_the_tokenizer(trained: TextTokenizer, tmp_path: Path) -> None:
    texts = open_pairs("tatoeba").val.sources
    (tmp_path / "tokenizer.json").write_text(trained.to_json(), "utf-8")
    for again in (TextTokenizer.from_json(trained.to_json()), TextTokenizer.load(tmp_path / "tokenizer.json")):
        assert again.to_json() == trained.to_json()
        assert again.encode(texts) == trained.encode(texts)


BERT_TOKENS = [
    *("[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("un", "##aff", "##able", "want", "##want", "##ed", "run", "##n", "##ing", ",", "."),
]


def write_bert_vocabulary(path: Path, *more: str, without: Sequence[str] = ()) -> Path:
    path.write_text("".join(f"{name}\n" for name in (*BERT_TOKENS, *more) if name not in without), "utf-8")
    return path


def test_a_vocabulary_file_of_bert_keeps_its_ids(tmp_path: Path) -> None:
    """The example of BERT's own test: UNwantéd,running."""
    tokenizer = TextTokenizer.load(write_bert_vocabulary(tmp_path / "vocab.txt"))
    assert (tokenizer.pad, tokenizer.unknown, tokenizer.start, tokenizer.end) == (0, 100, 101, 102)
    assert tokenizer.vocabulary == len(BERT_TOKENS) == 115
    (row,) = tokenizer.encode(["UNwant\u00e9d,running"])
    assert [tokenizer.names[token] for token in row] == ["un", "##want", "##ed", ",", "run", "##n", "##ing"]
    assert row == [104, 108, 109, 113, 110, 111, 112]
    assert tokenizer.decode([101, *row, 102, 0, 0]) == "unwanted, running"
    assert show(tokenizer, "unaffable runxing [SEP]")[:4] == ["un", "##aff", "##able", "[UNK]"]
    assert 102 not in tokenizer.encode(["[SEP]"])[0]
    pieces = tokenizer.pieces("UNwant\u00e9d, run")
    assert [(piece.text, piece.start, piece.end, piece.starts_word) for piece in pieces] == [
        *(("un", 0, 2, True), ("want", 2, 6, False), ("ed", 6, 8, False), (",", 8, 9, True), ("run", 10, 13, True)),
    ]
    again = TextTokenizer.from_json(tokenizer.to_json())
    assert (again.pad, again.unknown, again.start, again.end) == (0, 100, 101, 102)
    assert again.encode(["UNwant\u00e9d,running"]) == [row]


def test_special_tokens_in_a_text_are_read_as_by_transformers_if_asked_for(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_bert_vocabulary(tmp_path / "vocab.txt"))
    transformers = pytest.importorskip("transformers")
    peer = transformers.BertTokenizer(vocab={name: number for number, name in enumerate(BERT_TOKENS)})
    texts = ["", "run [MASK].", "UNwant\u00e9d[SEP] [UNK] running", "[MASK][MASK] un[PAD]", "[mask] [CLS [unused1]"]
    ours = tokenizer.encode(texts, special_tokens=True)
    assert ours == [peer(text)["input_ids"] for text in texts]
    assert ours[1] == [101, 110, 103, 114, 102]
    assert tokenizer.encode(["run [MASK]."]) == [[110, 100, 100, 100, 114]]  # three characters without a token
    again = TextTokenizer.from_json(tokenizer.to_json())
    assert again.encode(texts, special_tokens=True) == ours


def test_upper_case_is_kept_if_the_vocabulary_has_it(tmp_path: Path) -> None:
    file = write_bert_vocabulary(tmp_path / "vocab.txt", "Run")
    assert show(TextTokenizer.load(file), "Run run") == ["Run", "run"]
    assert show(TextTokenizer.load(file, lower=True), "Run run") == ["run", "run"]
    file = write_bert_vocabulary(tmp_path / "vocab.txt")
    assert show(TextTokenizer.load(file, lower=False), "Run run") == ["[UNK]", "run"]


def test_a_vocabulary_file_of_too_many_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_VOCABULARY", 100)
    with pytest.raises(CheckpointError, match="has 115 lines; expected one token per line, at most 100"):
        TextTokenizer.load(write_bert_vocabulary(tmp_path / "vocab.txt"))


def test_a_wrong_vocabulary_file_gives_one_line(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    with pytest.raises(CheckpointError, match=r"vocab\.txt cannot be read: No such file"):
        TextTokenizer.load(file)
    with pytest.raises(CheckpointError, match=r"vocab\.txt has 'run' twice; expected one token per line"):
        TextTokenizer.load(write_bert_vocabulary(file, "run"))
    with pytest.raises(CheckpointError, match=r"vocab\.txt has no \[UNK\]"):
        TextTokenizer.load(write_bert_vocabulary(file, without=["[UNK]"]))
    with pytest.raises(CheckpointError, match=r"vocab\.txt has no token for `start`; expected <s> or \[CLS\]"):
        TextTokenizer.load(write_bert_vocabulary(file, without=["[CLS]"]))
    file.write_bytes(b"[UNK]\n\xff\n")
    with pytest.raises(CheckpointError, match="cannot be read: 'utf-8' codec"):
        TextTokenizer.load(file)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"`lower` is for a vocab\.txt"):
        TextTokenizer.load(tmp_path / "tokenizer.json", lower=True)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(CheckpointError, match="it is a named pipe"):
        TextTokenizer.load(tmp_path / "pipe.json")


def test_wrong_arguments_give_one_line(trained: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="unknown kind of tokenizer 'bp'; did you mean 'bpe'"):
        TextTokenizer.train("bp", ["a"], 10)
    with pytest.raises(ConfigError, match="`vocabulary` is 0; expected 1 to"):
        TextTokenizer.train_bpe(["a"], 0)
    with pytest.raises(ConfigError, match="`vocabulary` is 8, but the different characters of the texts alone are 15"):
        TextTokenizer.train_bpe(CORPUS, 8)
    for texts in (list[str](), [" ", ""]):
        with pytest.raises(DataError, match="there is no text to train a tokenizer on"):
            TextTokenizer.train_bpe(texts, 100)
    with pytest.raises(ConfigError, match="encode got one text; expected a list"):
        trained.encode("Tom")
    with pytest.raises(DataError, match=r"text 2, 'a.*udcff', is not Unicode; expected text in UTF-8"):
        trained.encode(["fine", "a\udcff"])
    for token in (-1, 800):
        with pytest.raises(ConfigError, match="is not in the vocabulary; expected 0 to 799"):
            trained.decode([5, token])


def test_a_missing_library_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    calls: list[Callable[[], object]] = [
        lambda: TextTokenizer.train_bpe(["a"], 10),
        lambda: TextTokenizer.from_json("{}"),
        lambda: TextTokenizer.load("vocab.txt"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"needs tokenizers, .*run: .*pip install .*\[text\]'"):
            call()
