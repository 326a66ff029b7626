"""Prompts: shipped sets, the world's splits, real sets from a folder, and every way a JSONL file can be wrong."""

import json
import subprocess
import sys

import pytest

from treedraft.data import prompts, world

GOOD = b'{"turns": ["What is two plus two?"]}\n'

BAD_LINES = {
    "a number": (b"42\n", "a number where an object"),
    "a string": (b'"context"\n', "a string where an object"),
    "a list": (b'["text"]\n', "a list where an object"),
    "null": (b"null\n", "null where an object"),
    "no keys": (b"{}\n", "no 'turns'; the keys are none"),
    "other keys": (b'{"prompt": "hi"}\n', "no 'turns'; the keys are 'prompt'"),
    "not JSON": (b"{turns}\n", "not JSON"),
    "deep": (b"[" * 100_000 + b"\n", "nested too deeply"),
    "turns a string": (b'{"turns": "hi"}\n', "'turns' must be a list of strings, got a string"),
    "turns null": (b'{"turns": null}\n', "'turns' must be a list of strings, got null"),
    "no turns": (b'{"turns": []}\n', "'turns' is empty"),
    "empty turn": (b'{"turns": [""]}\n', "turn 1 is blank"),
    "spaces": (b'{"turns": ["hi", "hello", " \\n\\t"]}\n', "turn 3 is blank"),
    "invisible": ('{"turns": ["\u200b\u00a0"]}\n'.encode(), "turn 1 is blank"),
    "null turn": (b'{"turns": ["hi", null, "so"]}\n', "turn 2 must be a string, got null"),
    "a message": (b'{"turns": [{"role": "assistant", "content": "hi"}]}\n', "turn 1 must be a string, got an object"),
    "assistant last": (b'{"turns": ["hi", "hello"]}\n', "2 turns end with the assistant"),
    "raw NUL": (b'{"turns": ["h\0i"]}\n', f"NUL at byte {len(GOOD) + 13}"),
    "escaped NUL": (b'{"turns": ["h\\u0000i"]}\n', "turn 1 has a NUL at character 1"),
    "surrogate": (b'{"turns": ["a\\ud800"]}\n', "turn 1 has a lone surrogate at character 1"),
    "latin-1": (b'{"turns": ["caf\xe9"]}\n', f"not UTF-8 at byte {len(GOOD) + 15} (0xe9)"),
    "cut": (b'{"turns": ["What is', "the file ends inside this line"),
    "cut in a character": (b'{"turns": ["caf\xc3', f"not UTF-8 at byte {len(GOOD) + 15} (0xc3)"),
    "id a number": (b'{"id": 7, "turns": ["hi"]}\n', "'id' must be a non-empty string, got 7"),
    "id twice": (b'{"id": "file-001", "turns": ["hi"]}\n', "id 'file-001' is already on line 1"),
}


@pytest.fixture
def file(tmp_path):
    def write(content: bytes, name: str = "file.jsonl"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("line, reason", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_with_file_and_line(file, line, reason):
    path = file(GOOD + line)
    with pytest.raises(ValueError) as error:
        prompts.read_jsonl(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert reason in str(error.value)


def test_further_bad_lines_are_counted(file):
    path = file(b"42\n" + GOOD + b"{}\n[]\n")
    with pytest.raises(ValueError, match=r"file\.jsonl:1: .*\(2 more bad lines: 3, 4\)"):
        prompts.read_jsonl(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_is_refused(file, content):
    with pytest.raises(ValueError, match=r"file\.jsonl:1: the file has no prompts"):
        prompts.read_jsonl(file(content))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            prompts.read_jsonl(path)


def test_utf16_is_refused_at_its_first_byte(file):
    with pytest.raises(ValueError, match=r":1: not UTF-8 at byte 0 \(0xff\)|:1: NUL at byte"):
        prompts.read_jsonl(file(GOOD.decode().encode("utf-16")))


def test_bom_blank_lines_crlf_and_a_missing_last_newline_are_accepted(file):
    conversation = json.dumps({"id": "x", "domain": "trips", "turns": ["Hi", "Hello", "Where\u2028to?"]}).encode()
    path = file(b"\xef\xbb\xbf" + GOOD.rstrip() + b"\r\n\r\n\n" + conversation)
    first, second = prompts.read_jsonl(path, domain="sums")
    assert first == prompts.Prompt(id="file-001", domain="sums", turns=("What is two plus two?",))
    assert second == prompts.Prompt(id="x", domain="trips", turns=("Hi", "Hello", "Where\u2028to?"))


def test_byte_offsets_count_the_bom(file):
    with pytest.raises(ValueError, match=r":1: not UTF-8 at byte 18 "):
        prompts.read_jsonl(file(b'\xef\xbb\xbf{"turns": ["caf\xe9"]}\n'))


def test_limit_stops_reading(file):
    path = file(GOOD * 3 + b"42\n")
    assert len(prompts.read_jsonl(path, limit=2)) == 2
    with pytest.raises(ValueError, match="limit is 0"):
        prompts.read_jsonl(path, limit=0)


def test_several_sets_take_turns():
    math, code = (prompts.prompt_set(name) for name in ("math", "code"))
    assert prompts.prompt_set("math+code", count=3) == [math[0], code[0], math[1]]
    assert len(prompts.prompt_set("math+code")) == len(math) + len(code)
    with pytest.raises(ValueError, match="unknown prompt set 'maths'.*several with \\+ between"):
        prompts.prompt_set("code+maths")


def test_shipped_sets_are_120_different_prompts():
    shipped = prompts.prompt_set("shipped")
    assert [prompt.domain for prompt in shipped[:4]] == ["math", "code", "chat", "math"]
    assert len(shipped) == len({prompt.id for prompt in shipped}) == len(prompts.known_prompt_texts()) == 120
    for name in prompts.SHIPPED:
        one = prompts.prompt_set(name)
        assert len(one) == 40 and {prompt.domain for prompt in one} == {name}
    code = {prompt.turns for prompt in prompts.prompt_set("code")}
    assert ("Write a Python function that checks whether a number is prime.",) in code
    assert len(prompts.prompt_set("shipped", count=7)) == 7


def test_known_texts_ignore_case_spacing_and_punctuation():
    assert prompts.normalise("  Why is the SKY\nblue?! ") == prompts.normalise("why is the sky blue")
    text = "write a python function that checks whether a number is PRIME"
    assert prompts.normalise(text) in prompts.known_prompt_texts()


@pytest.mark.parametrize("name, split", [("world", "evaluation"), ("world-validation", "validation")])
def test_world_sets_are_balanced_and_of_their_split(name, split):
    drawn = prompts.prompt_set(name, count=12)
    assert [prompt.domain for prompt in drawn] == list(world.DOMAINS) * 4
    assert all(world.split_of(prompt.turns[0]) == split for prompt in drawn)
    assert drawn == prompts.prompt_set(name, count=12)
    assert drawn[:5] == prompts.prompt_set(name, count=5)
    assert drawn != prompts.prompt_set(name, count=12, seed=1)


def test_real_sets_come_from_files(file, tmp_path):
    gsm8k = file(GOOD * 3, "gsm8k.jsonl")
    mt_bench = file(b'{"turns": ["Write a post.", "Now make it rhyme."]}\n', "mt-bench.jsonl")
    file(b"\xe9\0", "._gsm8k.jsonl")
    named = prompts.prompt_set(str(gsm8k), count=2)
    assert [(prompt.id, prompt.domain) for prompt in named] == [("gsm8k-001", "math"), ("gsm8k-002", "math")]
    # mt-bench lists user messages only; the second needs the target's own reply to the first.
    (bench,) = prompts.prompt_set(str(mt_bench))
    assert bench == prompts.Prompt(id="mt-bench-001", domain="chat", turns=("Write a post.",))
    together = [prompt.id for prompt in prompts.prompt_set(str(tmp_path))]
    assert together[:3] == ["gsm8k-001", "mt-bench-001", "gsm8k-002"]
    assert [prompt.id for prompt in prompts.prompt_set(str(tmp_path), count=2)] == together[:2]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no JSONL file in this folder"):
        prompts.prompt_set(str(tmp_path / "empty"))


def test_real_sets_come_from_the_hub(file, monkeypatch):
    rows = file(b'{"problem": "1 + 1?"}\n{"problem": "2 + 2?"}\n', "test.jsonl")
    monkeypatch.setattr(prompts, "_download", lambda name, source: rows)
    first, second = prompts.prompt_set("math500")
    assert first.id == "math500-001" and first.domain == "math"
    assert second.turns[0].startswith("2 + 2?\nPlease reason step by step")
    with pytest.raises(ValueError, match="has other columns than livecodebench needs"):
        prompts.prompt_set("livecodebench")


def test_every_hub_set_formats_a_row():
    row = {"question": "Q", "problem": "Q", "question_content": "Q", "instruction": "Q", "input": "", "prompt": ["Q"]}
    for source in prompts.HUB_SETS.values():
        assert "Q" in source.text(row)
    assert "Input:\n7" in prompts.HUB_SETS["alpaca"].text(row | {"input": "7"})
    assert "class Solution" in prompts.HUB_SETS["livecodebench"].text(row | {"starter_code": "class Solution: ..."})


def test_an_unreachable_set_names_both_ways(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_, **__):
        raise hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    with pytest.raises(ValueError, match=r"'aime25' cannot be fetched.*path of a file aime25\.jsonl, or connect"):
        prompts.prompt_set("aime25")


def test_unknown_names_and_counts_are_refused():
    with pytest.raises(ValueError, match="unknown prompt set 'maths' .did you mean 'math'"):
        prompts.prompt_set("maths")
    with pytest.raises(ValueError, match="count is 0"):
        prompts.prompt_set("world", count=0)


def test_default_sets():
    assert prompts.default_set("pocket") == prompts.default_set("tiny") == "world"
    assert prompts.default_set("smollm2-135m") == "shipped"


def test_importing_prompts_does_not_import_torch():
    code = "import sys, treedraft.data.prompts; assert not {'torch', 'pandas', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
