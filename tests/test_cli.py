"""Commands as a user meets them: one sentence and a non-zero exit for bad input, and a killed grid that ends the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from treedraft.grid import load_grid

ROOT = Path(__file__).parents[1]


def run(*arguments: str, runs: Path, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TREEDRAFT_RUNS": str(runs), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode not in (0, 1), (result.returncode, result.stdout, result.stderr)
    assert lines[-1].startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    for word in words:
        assert word in lines[-1], (word, lines[-1])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished smoke grid."""
    runs = tmp_path_factory.mktemp("smoke")
    result = run("treedraft.ablate", "--grid", "smoke", runs=runs)
    assert result.returncode == 0, result.stderr
    assert "causal/attention" in result.stdout
    return runs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["treedraft.decode", "--dpeth", "3", "hi"], ["--dpeth"]),
        (["treedraft.decode", "--depth", "0", "hi"], ["depth is 0"]),
        (["treedraft.decode", "--width", "0", "hi"], ["width is 0"]),
        (["treedraft.decode", "--budget", "0", "hi"], ["budget is 0"]),
        (["treedraft.decode", "--temperature", "-1", "hi"], ["-1"]),
        (["treedraft.decode", "--top-p", "2", "hi"], ["top_p is 2"]),
        (["treedraft.decode", "--top-k", "0", "hi"], ["top_k is 0"]),
        (["treedraft.decode", "--logit-bias", "x", "hi"], ["'x'", "ID=BIAS"]),
        (["treedraft.decode", "--target", "pocket", "--logit-bias", "99999=1", "hi"], ["token 99999"]),
        (["treedraft.decode", "--accept", "ratio", "hi"], ["ratio", "temperature"]),
        (["treedraft.decode", "--accept", "sampler", "hi"], ["sampler_match"]),
        (["treedraft.decode", "--budget", "auto", "--chain", "hi"], ["auto", "--chain"]),
        (["treedraft.decode", "--budget", "auto", "--admit", "fanout", "hi"], ["auto", "--admit pop"]),
        (["treedraft.decode", "--scorer", "margin", "hi"], ["margin", "per_depth"]),
        (["treedraft.decode", "--chain", "--frontier", "3", "hi"], ["--frontier", "--chain"]),
        (["treedraft.decode", "--frontier", "0", "hi"], ["frontier is 0"]),
        (["treedraft.decode", "--caps", "3,0", "hi"], ["caps are (3, 0)", "at least 1"]),
        (["treedraft.decode", "--caps", "3;2", "hi"], ["'3;2'", "3,2,1"]),
        (["treedraft.decode", "--caps", "3", "--gap-cap", "1,1", "hi"], ["caps", "gap_cap", "exclude"]),
        (["treedraft.decode", "--gap-cap", "1,nan", "hi"], ["gap_cap", "nan"]),
        (["treedraft.decode", "--gap-cap", "1", "hi"], ["--gap-cap '1'", "BETA,G0"]),
        (["treedraft.decode", "--temperature", "1", "--accept", "ratio", "--no-count-root", "hi"], ["--no-count-root", "--accept"]),
        (["treedraft.decode", "--target", "pocket", "--candidates", "5000", "hi"], ["candidates is 5000", "2048"]),
        (["treedraft.bench", "ranks", "--target", "tiny", "--least", "0"], ["--least", "0"]),
        (["treedraft.decode", "--batch", "0", "hi"], ["--batch is 0"]),
        (["treedraft.decode", "--batch", "4", "hi"], ["--batch is 4", "--prompts"]),
        (["treedraft.decode", "--budget", "lots", "hi"], ["lots", "auto"]),
        (["treedraft.decode", "--tree", "--chain", "hi"], ["--tree", "--chain"]),
        (["treedraft.decode", "  "], ["empty prompt"]),
        (["treedraft.decode", "--target", "pockte", "hi"], ["pockte", "pocket"]),
        (["treedraft.decode", "--target", "tiny", "--drafter", "nowhere", "hi"], ["nowhere"]),
        (["treedraft.ablate", "--grid", "coer"], ["coer", "core"]),
        (["treedraft.ablate", "--cell", "x"], ["cell", "'x'"]),
        (["treedraft.ablate", "--limit", "0"], ["0"]),
        (["treedraft.ablate", "--grid", "smoke", "--set", "train.stepz=3"], ["stepz", "steps"]),
        (["treedraft.ablate", "--grid", "smoke", "--set", "drafter.context.name=ful"], ["ful", "full"]),
        (["treedraft.train", "--set", "drafter.correction.name=atention"], ["atention", "attention"]),
        (["treedraft.train", "--set", "train.steps=0"], ["train.steps", "0"]),
        (["treedraft.train", "--set", "nonsense"], ["KEY=VALUE"]),
        (["treedraft.train", "--config", "nowhere.toml"], ["nowhere.toml"]),
        (["treedraft.bench", "tre"], ["tre", "tree"]),
        (["treedraft.bench", "context", "--tokens", "0"], ["--tokens", "0"]),
        (["treedraft.decode", "--target", "tiny", "--drafter-device", "cpux", "hi"], ["device 'cpux'", "known: cpu"]),
        (["treedraft.decode", "--target", "tiny", "--device", "meta", "hi"], ["device 'meta'", "known: cpu"]),
        (["treedraft.decode", "--drafter-device", "cpu", "--temperature", "1", "--accept", "block", "hi"], ["sampler_match", "block"]),
        (["treedraft.decode", "--target", "tiny", "--rope-scaling", "yarn:2", "hi"], ["yarn:2", "ntk:4"]),
        (["treedraft.train", "--rope-scaling", "4"], ["'4'", "ntk:4"]),
        (["treedraft.data", "show", "nowhere"], ["nowhere"]),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    one_sentence(run(*arguments, runs=tmp_path), *words)
    assert not any(tmp_path.rglob("*.*")), "nothing half-written"


def test_malformed_files_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('question = "x"\n[train\n')
    one_sentence(run("treedraft.ablate", "--grid", str(tmp_path / "bad.toml"), runs=tmp_path / "runs"), "bad.toml", "line 2")
    (tmp_path / "bad.jsonl").write_text('{"turns": ["fine"]}\n{"turns": [}\n')
    one_sentence(
        run("treedraft.decode", "--target", "tiny", "--prompts", str(tmp_path / "bad.jsonl"), runs=tmp_path / "runs"), "bad.jsonl:2"
    )


def test_damaged_drafter_and_long_prompt(smoke: Path, tmp_path: Path) -> None:
    trained = next((smoke / "train").glob("*causal-attention*/drafter"))
    one_sentence(run("treedraft.decode", "--target", "tiny", "--drafter", str(trained), "word " * 400, runs=tmp_path), "context window")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((trained / "config.json").read_bytes())
    weights = (trained / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    one_sentence(run("treedraft.decode", "--target", "tiny", "--drafter", str(broken), "hi", runs=tmp_path), "model.safetensors", "damaged")


def test_no_network_and_no_cache_says_what_to_run(tmp_path: Path) -> None:
    offline = {"TREEDRAFT_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    one_sentence(run("treedraft.decode", "hello", runs=tmp_path, **offline), "smollm2")


def test_decode_prints_tau_and_identity(smoke: Path, tmp_path: Path) -> None:

    trained = next((smoke / "train").glob("*causal-attention*/drafter"))
    flags = ["--target", "tiny", "--drafter", str(trained), "--compare", "--max-new-tokens", "24"]
    for temperature in ("0", "1"):
        result = run("treedraft.decode", *flags, "--temperature", temperature, "--json", "hello there", runs=tmp_path)
        record = json.loads(result.stdout)
        assert result.returncode == 0 and record["identical"] is True
        assert 1 <= record["tau"] <= 6 and record["speedup"] > 0
    shown = run("treedraft.decode", *flags, "--show-tree", "--depth", "3", "--budget", "8", "hello there", runs=tmp_path)
    assert "identical to plain decoding" in shown.stdout and "└─" in shown.stdout and "stages:" in shown.stdout


def test_decode_samples_and_sizes_its_trees(smoke: Path, tmp_path: Path) -> None:
    trained = next((smoke / "train").glob("*causal-attention*/drafter"))
    flags = ["--target", "tiny", "--drafter", str(trained), "--compare", "--json", "--max-new-tokens", "16", "hello there"]
    cache = {"TREEDRAFT_CACHE": str(tmp_path / "cache")}
    sampled = run("treedraft.decode", *flags, "--temperature", "0.8", "--top-p", "0.9", "--seed", "7", "--budget", "auto", runs=tmp_path, **cache)
    record = json.loads(sampled.stdout)
    assert sampled.returncode == 0 and record["identical"] is True and record["budget"] == "auto"
    assert record["sampling"] == {"temperature": 0.8, "top_p": 0.9} and record["lossless"] is True
    many = run("treedraft.decode", *flags[:-1], "--prompts", "code", "--limit", "3", "--batch", "2", runs=tmp_path)
    records = [json.loads(line) for line in many.stdout.splitlines()]
    assert many.returncode == 0 and len(records) == 3
    assert all(record["identical"] and record["batch"] == 2 and "speedup" not in record for record in records)
    for rule, lossless in (("sequoia", True), ("typical", False)):
        drawn = run("treedraft.decode", *flags, "--temperature", "1", "--accept", rule, runs=tmp_path)
        record = json.loads(drawn.stdout)
        assert drawn.returncode == 0 and record["accept"] == rule and record["lossless"] is lossless
        assert record["mode"] == "drawn" and record["widths"] == [4, 2, 1, 1, 1] and "budget" not in record


def test_benches_of_decoding(smoke: Path, tmp_path: Path) -> None:
    trained = next((smoke / "train").glob("*causal-attention*/drafter"))
    flags = ["--target", "tiny", "--drafter", str(trained), "--output", str(tmp_path / "numbers.json")]
    cache = {"TREEDRAFT_CACHE": str(tmp_path / "cache")}
    for name, more, keys in (
        ("profile", ["--attention", "sdpa", "--dtype", "float64", "--requests", "2"], {"draft_ms", "correction_ms", "verify_ms_behind_64", "verify_ms_of_2_behind_64"}),
        ("decode", ["--prompts", "code", "--count", "2", "--max-new-tokens", "12", "--repeats", "1"], {"code", "depth"}),
        ("replay", ["--prompts", "code", "--count", "2", "--max-new-tokens", "12", "--depth", "4", "--budget", "20", "--rope-scaling", "ntk:2"],
         {"ratio", "tau_live", "rope_scaling"}),
    ):
        measured = run("treedraft.bench", name, *flags, *more, runs=tmp_path, **cache)
        assert measured.returncode == 0, measured.stderr
        assert keys <= json.loads((tmp_path / "numbers.json").read_text()).keys()


def test_bench_context_writes_numbers_a_table_and_a_figure(tmp_path: Path) -> None:
    out = tmp_path / "context.json"
    flags = ["--tokens", "300", "3000", "--layers", "2", "--depth", "3", "--repeats", "1", "--output", str(out)]
    measured = run("treedraft.bench", "context", *flags, runs=tmp_path)
    assert measured.returncode == 0, measured.stderr
    record = json.loads(out.read_text())
    rows = pd.read_csv(out.with_suffix(".csv"))
    assert rows.context.tolist() == ["full", "full", "longspark", "longspark"] and (rows.draft_ms > 0).all() and (rows.update_ms > 0).all()
    held = {name: part.set_index("tokens").bytes.to_dict() for name, part in rows.groupby("context")}
    assert held["full"][3000] == 10 * held["full"][300] and held["longspark"][3000] == held["longspark"][300]
    assert record["3000 tokens"]["full bytes"] == held["full"][3000] and (rows.shared_bytes <= rows.bytes).all()
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux")
def test_bench_context_sends_a_prompt_through_the_target(tmp_path: Path) -> None:
    """Longer than its window; what is in use beside the cache is far from the rows x columns of a mask."""
    out = tmp_path / "prefill.json"
    flags = ["context", "--prefill", "--tokens", "6000", "--output", str(out)]
    one_sentence(run("treedraft.bench", *flags, runs=tmp_path), "prompt of 6000 tokens does not fit the context window of 512")
    measured = run("treedraft.bench", *flags, "--rope-scaling", "ntk:12", runs=tmp_path)
    assert measured.returncode == 0, measured.stderr
    record = json.loads(out.read_text())
    found = record["6000 tokens"]
    assert (record["benchmark"], record["target"], record["rope_scaling"], record["target_layers"]) == ("context --prefill", "tiny", "ntk:12", 2)
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values of two layers with two heads of 8, four bytes each
    assert 6000 * per_token < found["cache_bytes"] < 8000 * per_token and found["state_bytes"] == 2 * 4 * 16 * (1 + 8) * 4 + 2 * 32 * 4
    assert found["seconds"] > 0 and found["transient_bytes"] < 4 * 2048 * 6000, "a float32 mask of the last chunk"


def test_a_longspark_drafter_from_a_file_under_scaled_angles(tmp_path: Path) -> None:
    """Trained from a TOML file, stored with its scaling, decoded under it, and refused without."""
    config = tmp_path / "drafter.toml"
    config.write_text(
        'target = "tiny"\nmethod = "longspark"\n[drafter]\nbackbone = { num_layers = 2 }\ncontext = { window = 6, summary = 3 }\n'
        "correction = { rank = 4 }\n[train]\nsteps = 3\nsequences = 4\nanchors = 2\n[data]\ntokens = 300\nmax_new_tokens = 16\n"
    )
    out = tmp_path / "drafter"
    trained = run("treedraft.train", "--config", str(config), "--rope-scaling", "ntk:24", "--export", str(out), runs=tmp_path)
    assert trained.returncode == 0, trained.stderr
    stored = json.loads((out / "config.json").read_text())
    assert stored["training"]["rope_scaling"] == stored["target"]["rope_scaling"] == "ntk:24"
    assert stored["drafter"]["context"] == {"name": "longspark", "window": 6, "summary": 3}
    (tmp_path / "long.jsonl").write_text(json.dumps({"turns": ["word " * 2000]}))  # 10,000 tokens, 20 times tiny's window
    flags = ["--target", "tiny", "--drafter", str(out), "--max-new-tokens", "8", "--compare", "--json", "--prompts", str(tmp_path / "long.jsonl")]
    decoded = run("treedraft.decode", "--rope-scaling", "ntk:24", *flags, runs=tmp_path)
    record = json.loads(decoded.stdout)
    assert record["identical"] is True and record["rope_scaling"] == "ntk:24"
    one_sentence(run("treedraft.decode", *flags, runs=tmp_path), "trained under rope scaling ntk:24", "--rope-scaling ntk:24")


def test_bench_vocabulary_compares_one_drafter_with_itself(tmp_path: Path) -> None:
    settings = ("drafter.draft_vocab_size=12", "train.steps=20", "data.tokens=1500", "data.max_new_tokens=24")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    trained = run("treedraft.train", "--target", "tiny", *flags, "--export", str(tmp_path / "drafter"), runs=tmp_path)
    assert trained.returncode == 0, trained.stderr
    flags = ["--target", "tiny", "--drafter", str(tmp_path / "drafter"), "--max-new-tokens", "16", "--depth", "5"]
    out = tmp_path / "numbers.json"
    measured = run("treedraft.bench", "vocabulary", *flags, "--count", "3", "--output", str(out), runs=tmp_path)
    assert measured.returncode == 0, measured.stderr
    record = json.loads(out.read_text())
    assert record["draft_vocab_size"] == 12 and record["prompts"] == 9 and 0 < record["outside"] < 1
    for mode in ("chain", "tree"):
        low, high = record[mode]["difference"][1:]
        gap = record[mode]["tau_restricted"] - record[mode]["tau_unrestricted"]
        assert record[mode]["tau_restricted"] >= 1 and low - 1e-9 <= gap <= high + 1e-9


def test_second_call_does_nothing_and_prints_the_same(smoke: Path) -> None:
    before = {path: path.stat().st_mtime_ns for part in ("train", "cells") for path in (smoke / part).rglob("*") if path.is_file()}
    result = run("treedraft.ablate", "--grid", "smoke", runs=smoke)
    assert result.returncode == 0 and "causal/attention" in result.stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_grid_reports_slots_calibration_outputs_and_controls(smoke: Path) -> None:
    """The controls hold, of what was measured and not typed; counts by slot are those of the rounds."""
    folder = smoke / "grids/smoke"
    page = (folder / "smoke.md").read_text()
    controls = page[page.index("## Controls") : page.index("## Training")]
    assert controls.count("| yes |") == 2 * 12 + 4 and "| NO |" not in controls and "ot recorded in these" not in page
    assert all((folder / f"smoke-{name}.png").is_file() for name in ("slots", "calibration", "outputs"))
    cells = pd.read_csv(folder / "smoke.cells.csv")
    for row in cells.itertuples():
        kept, left, off, accepted = (
            [float(part) for part in str(getattr(row, name)).split()] for name in ("spine_kept", "spine_left", "spine_off", "steps_accepted")
        )
        survived = [float(part) for part in str(row.survival).split()]
        assert [(a + b) / row.rounds for a, b in zip(kept, off, strict=True)] == pytest.approx(survived, abs=6e-5)
        assert sum(kept) + sum(off) == sum(accepted) and sum(left) <= row.rounds
        assert row.mode == "tree" or sum(off) == 0
        assert (row.mode == "tree") == isinstance(row.paths_drafts, str)
    assert set(pd.read_csv(folder / "smoke.prompts.csv").looped) <= {0, 1}


def test_a_cell_from_before_slots_were_recorded_is_measured_anew(smoke: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(smoke, tmp_path / "runs")
    old, *others = sorted((tmp_path / "runs/cells").glob("*/result.json"))
    before = {path: path.stat().st_mtime_ns for path in others}
    found = json.loads(old.read_text())
    old.write_text(json.dumps({key: value for key, value in found.items() if key not in ("spine", "steps", "paths")}))
    listed = run("treedraft.ablate", "--grid", "smoke", "--dry-run", runs=tmp_path / "runs").stdout
    assert listed.count("trained") == 1
    assert run("treedraft.ablate", "--grid", "smoke", runs=tmp_path / "runs").returncode == 0
    again = json.loads(old.read_text())
    assert {key: again[key] for key in found if key not in ("hardware", "commit")} == {
        key: found[key] for key in found if key not in ("hardware", "commit")
    }
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_killed_grid_ends_with_the_same_numbers(smoke: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TREEDRAFT_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for marker in ("features", "train/*/checkpoint.pt", "cells/*/result.json"):
        process = subprocess.Popen(
            [sys.executable, "-m", "treedraft.ablate", "--grid", "smoke"], cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None and not any(tmp_path.glob(marker)):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    result = run("treedraft.ablate", "--grid", "smoke", runs=tmp_path)
    assert result.returncode == 0, result.stderr
    columns = ["cell", "tau", "survival", "rounds", "emitted"]
    first, second = (pd.read_csv(runs / "grids/smoke/smoke.cells.csv")[columns] for runs in (smoke, tmp_path))
    pd.testing.assert_frame_equal(first, second, check_exact=True)


def test_one_cell_runs_alone_and_failed_cells_do_not_stop_the_others(smoke: Path, tmp_path: Path) -> None:
    listed = run("treedraft.ablate", "--grid", "smoke", "--dry-run", runs=tmp_path).stdout.splitlines()
    cell_id = listed[0].split()[1]
    alone = run("treedraft.ablate", "--grid", "smoke", "--cell", cell_id, runs=tmp_path)
    assert alone.returncode == 0 and f'"cell": "{cell_id}"' in alone.stdout
    again = run("treedraft.ablate", "--grid", "smoke", "--dry-run", runs=tmp_path).stdout.splitlines()
    assert again[0].startswith("done") and again[-1].startswith("missing")
    broken = load_grid(ROOT / "ablations/smoke.toml").arms[-1]
    damaged = tmp_path / "train" / broken.train_id / "checkpoint.pt"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a checkpoint")
    whole = run("treedraft.ablate", "--grid", "smoke", runs=tmp_path)
    assert whole.returncode == 1 and "damaged checkpoint" in whole.stderr
    rows = pd.read_csv(tmp_path / "grids/smoke/smoke.cells.csv")
    failed = rows["status"].str.startswith("failed")
    assert set(rows["label"][failed]) == {broken.label} and (rows["status"][~failed] == "ok").all()
    assert len(rows) == len(listed) and set(rows["train_steps"].dropna()) == {12}
