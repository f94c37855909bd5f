"""The figures of the batching report, and its page."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvloom_client import Chunk
from kvloom_load import report
from kvloom_load.arrivals import Arrivals
from kvloom_load.drive import Run, Seen
from kvloom_load.figures import Target, add_efficiency, row, summary
from kvloom_load.scrape import Metrics, TritonStats, Watch

ROOT = Path(__file__).parents[2]


def chunk(text: str, tokens: int) -> Chunk:
    return Chunk(text, (5,) * tokens, None, 0)


def test_a_chunk_without_text_is_no_token():
    arrivals = Arrivals(begin=10.0)
    for text, tokens, now in [
        ("", 0, 10.1),
        ("", 1, 10.2),
        ("é", 1, 10.5),
        (" a", 2, 10.9),
        (" b", 0, 11.0),
        ("", 1, 11.1),
    ]:
        arrivals.add(chunk(text, tokens), now)
    arrivals.end = 11.1
    assert arrivals.ttft == pytest.approx(0.5)
    assert arrivals.gaps == pytest.approx([0.2, 0.2, 0.1])
    assert arrivals.tokens == 2 + 2 + 1 + 1
    assert arrivals.seconds == pytest.approx(1.1)
    assert Arrivals(**json.loads(json.dumps(asdict(arrivals)))) == arrivals


def test_an_answer_without_text_has_no_first_token():
    arrivals = Arrivals(0.0)
    arrivals.add(chunk("", 1), 1.0)
    assert (arrivals.ttft, arrivals.gaps, arrivals.tokens) == (None, [], 1)


# figures

BEFORE = """\
# TYPE kvloom_step_sequences histogram
kvloom_step_sequences_count 10
kvloom_step_sequences_sum 10
kvloom_step_sequences_bucket{le="1"} 10
kvloom_step_sequences_bucket{le="2"} 10
kvloom_step_sequences_bucket{le="4"} 10
kvloom_step_sequences_bucket{le="+Inf"} 10
# TYPE kvloom_preemptions_total counter
kvloom_preemptions_total{mode="swap"} 1
# TYPE kvloom_prefix_tokens_queried_total counter
kvloom_prefix_tokens_queried_total 100
# TYPE kvloom_prefix_tokens_hit_total counter
kvloom_prefix_tokens_hit_total 50
# TYPE nv_inference_count counter
nv_inference_count{model="llm"} 7
"""
AFTER = """\
# TYPE kvloom_step_sequences histogram
kvloom_step_sequences_count 20
kvloom_step_sequences_sum 38
kvloom_step_sequences_bucket{le="1"} 12
kvloom_step_sequences_bucket{le="2"} 12
kvloom_step_sequences_bucket{le="4"} 18
kvloom_step_sequences_bucket{le="+Inf"} 20
# TYPE kvloom_preemptions_total counter
kvloom_preemptions_total{mode="swap"} 4
kvloom_preemptions_total{mode="recompute"} 2
# TYPE kvloom_prefix_tokens_queried_total counter
kvloom_prefix_tokens_queried_total 300
# TYPE kvloom_prefix_tokens_hit_total counter
kvloom_prefix_tokens_hit_total 200
"""


def test_what_changed_between_two_looks():
    change = Metrics.parse(AFTER).since(Metrics.parse(BEFORE))
    assert change.mean("kvloom_step_sequences") == 2.8
    assert change.buckets("kvloom_step_sequences") == [(1, 2), (4, 6), (float("inf"), 2)]
    assert change.value("kvloom_preemptions_total", mode="swap") == 3
    assert change.value("kvloom_preemptions_total", mode="recompute") == 2
    assert change.mean("kvloom_ttft_seconds") is None
    assert not any(name.startswith("nv_") for name, _ in change.values)


def a_run(users: int = 2, speed: float = 1.0) -> Run:
    """Four seconds: answers of five tokens, 0.1 s apart, a new one begins every second for each user."""
    answers = [
        Arrivals(
            begin=second,
            end=second + 0.7,
            times=[second + 0.3 + 0.1 * token for token in range(5)],
            counts=[1] * 5,
            outcome="ok",
        )
        for second in range(4)
        for _ in range(round(users * speed))
    ]
    answers.append(Arrivals(begin=1.0, end=3.0, times=[1.5], counts=[1], outcome="failed"))
    # slow, and its last token comes after the end
    answers.append(Arrivals(begin=1.0, end=5.0, times=[3.5, 4.5], counts=[1, 1], outcome="ok"))
    watch = Watch("unused")
    watch.seen = [(0.0, Metrics.parse(BEFORE)), (5.5, Metrics.parse(AFTER))]
    triton = {
        "llm": TritonStats({1: 6, 2: 2}, 10, 0.02),
        "generate": TritonStats({}, 0, 0.0),
    }
    locust = [
        {"method": "TTFT", "name": "steady", "num_requests": 9, "num_none_requests": 0, "num_failures": 0}
        | {"total_response_time": 2700.0}
    ]
    return Run(users, 4, Seen(0.0, answers, locust), watch, triton)


def test_figures_of_a_run():
    figures = row(a_run(), "default", Target(ttft_ms=500, itl_ms=200))
    assert (figures["ok"], figures["failed"], figures["cut"], figures["cancelled"]) == (9, 1, 0, 0)
    # 8 answers of 5 tokens and the slow one's first; nothing of the failed one, nothing after the end
    assert figures["tokens_per_s"] == 41 / 4
    assert figures["ttft_ms"]["p50"] == pytest.approx(300)
    assert figures["itl_ms"]["p50"] == pytest.approx(100)
    assert figures["e2e_ms"]["mean"] == pytest.approx((8 * 700 + 4000) / 9, abs=0.01)
    assert figures["good_answers"] == 0.8
    assert figures["goodput_per_s"] == 2
    assert figures["engine"]["sequences_per_step"] == 2.8
    assert figures["engine"]["step_sequences"] == [[1, 2], [4, 6], [None, 2]]
    assert figures["engine"]["prefix_hits"] == 0.75
    assert figures["engine"]["preemptions"] == {"swap": 3, "recompute": 2}
    assert figures["triton"]["llm"] == {"requests": 10, "mean_batch": 1.25, "batches": [[1, 6], [2, 2]], "queue_ms": 2}
    assert figures["triton"]["generate"]["mean_batch"] is None
    assert figures["timeline"]["tokens_per_s"] == [10, 10, 10, 11]
    # in the last second the slow one's first token came, after 2.5 s, and its only gap ended after the test
    first, between = figures["latencies"]["ttft_ms"], figures["latencies"]["itl_ms"]
    assert [second["p50"] for second in first] == pytest.approx([300] * 4)
    assert [second["p99"] > 2000 for second in first] == [False, False, False, True]
    assert [second["p99"] for second in between] == pytest.approx([100] * 4)
    assert figures["locust"][0]["mean"] == 300
    json.dumps(figures, allow_nan=False)


def test_figures_of_conversations():
    def answer(turn: int, prompt: int, cached: int, outcome: str = "ok", lost: bool = False) -> Arrivals:
        times = [turn + 0.1 * turn] if outcome == "ok" else []
        told = {"turn": turn, "prompt_tokens": prompt, "cached_tokens": cached, "outcome": outcome, "lost": lost}
        return Arrivals(begin=turn, end=turn + 1, times=times, counts=[1] * len(times), **told)

    run = a_run()
    run.seen.answers[:] = [
        answer(1, 10, 0),
        answer(1, 20, 4),
        answer(2, 60, 50),
        answer(2, 0, 0, "failed", lost=True),
        answer(0, 7, 0),
    ]
    figures = row(run, "default", Target())
    first, second = figures["turns"]
    assert (first["turn"], first["answers"], first["prompt_tokens"], first["computed_tokens"]) == (1, 2, 15, 13)
    assert (second["turn"], second["answers"], second["prompt_tokens"], second["computed_tokens"]) == (2, 1, 60, 10)
    assert [turn["ttft_ms"]["p50"] for turn in figures["turns"]] == [pytest.approx(100), pytest.approx(200)]
    assert figures["conversations"] == {"begun": 2, "lost": 1}
    assert row(a_run(), "default", Target())["turns"] == []


def test_efficiency_is_against_one_user_of_the_same_configuration():
    rows = [
        {"configuration": name, "users": users, "tokens_per_s": speed}
        for name, users, speed in [("a", 1, 10.0), ("a", 4, 30.0), ("b", 1, 20.0), ("b", 4, 20.0), ("c", 4, 9.0)]
    ]
    add_efficiency(rows)
    assert [row.get("efficiency") for row in rows] == [1.0, 0.75, 1.0, 0.25, None]


def test_summaries():
    assert summary([]) is None
    assert summary([0.5]) == {"mean": 500, "p50": 500, "p95": 500, "p99": 500}
    assert summary(number / 1000 for number in range(101)) == {"mean": 50, "p50": 50, "p95": 95, "p99": 99}


# the page


def talking(run: Run, cached: int) -> Run:
    """The same answers, as turns of conversations."""
    for number, answer in enumerate(run.seen.answers):
        answer.turn = number % 4 + 1
        answer.prompt_tokens = 100 * answer.turn
        answer.cached_tokens = cached * (answer.prompt_tokens - 80)
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    rows = [
        row(talking(a_run(users, speed), cached), name, Target())
        for name, speed, cached in (("a", 1, 0), ("b", 2, 1))
        for users in (1, 2, 8)
    ]
    add_efficiency(rows)
    meta = {"name": "test <&>", "about": "a test", "user": "GrpcUser", "model": "tiny", "seconds": 4}
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(report.html({**meta, "target": asdict(Target())}, rows), encoding="utf-8")
    return page


def test_the_page_needs_nothing_else(written):
    html = written.read_text()
    assert "<script" not in html
    assert not re.search(r'(src|href)="(?!#)', html)
    assert "url(http" not in html
    assert "test &lt;&amp;&gt;" in html
    assert html.count("<svg") == html.count("</svg>") == 14
    assert html.count("conversations started") == 6


LOOK = """
<script>
addEventListener("load", () => {
  const box = (e) => e.getBoundingClientRect();
  const outside = (e, s) => box(e).left < box(s).left - 2 || box(e).right > box(s).right + 2
    || box(e).top < box(s).top - 2 || box(e).bottom > box(s).bottom + 2;
  const svgs = [...document.querySelectorAll("svg")];
  const seen = {
    plots: svgs.map((s) => ({
      title: s.closest("figure").innerText.slice(0, 60),
      width: box(s).width, height: box(s).height,
      texts: [...s.querySelectorAll("text")].map((t) => t.textContent),
      outside: [...s.querySelectorAll("text")].filter((t) => outside(t, s)).map((t) => t.textContent),
      marks: [...s.querySelectorAll("path, use")].filter((p) => box(p).width > 0 || box(p).height > 0).length,
    })),
    rows: document.querySelectorAll("#figures tr").length,
    empty: [...document.querySelectorAll("#figures td")].filter((t) => !t.innerText.trim()).length,
    page: [document.documentElement.scrollWidth, innerWidth],
  };
  document.body.innerHTML = "<pre id=seen></pre>";
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
</script>
"""


def browse(page: Path, folder: Path, *what: str) -> str:
    """Open a page in Chromium, which does ``what`` with it; what it prints."""
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        pytest.skip("no browser looks at the page; install one: apt-get install chromium-headless-shell")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1280,4000", *what, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_page_in_a_browser(written, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(written.read_text().replace("</body>", LOOK + "</body>"))
    dom = browse(page, tmp_path, "--dump-dom")
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)[1])
    assert len(seen["plots"]) == 14
    for plot in seen["plots"]:
        assert plot["width"] > 300, plot
        assert plot["height"] > 80, plot
        assert plot["outside"] == [], plot
        assert plot["marks"] > 10, plot
    titles = [text for plot in seen["plots"] for text in plot["texts"]]
    for title in ("Throughput", "Efficiency", "Steps by number of sequences", "Triton's batches for llm", "a, 8 users"):
        assert title in titles
    assert (seen["rows"], seen["empty"]) == (7, 0)
    width, window = seen["page"]
    assert width <= window


@pytest.mark.parametrize("where", ["made here", "load/results"])
def test_a_picture_of_the_page(written, tmp_path, where):
    page = written if where == "made here" else ROOT / where / "smollm2.html"
    browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    pixels = (255 * imread(tmp_path / "page.png")[..., :3]).round().astype(int)
    assert pixels.shape == (4000, 1280, 3)
    # of lines and of bars: neither text nor a blank page has any
    for colour in ("#1f77b4", "#440154"):
        drawn = (pixels == [int(colour[place : place + 2], 16) for place in (1, 3, 5)]).all(-1)
        assert drawn.sum() > 2000, colour
