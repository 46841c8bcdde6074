"""`paceline bench report`: one page from a sweep's records, and options for `paceline serve --config`."""

import argparse
import json
from pathlib import Path


def add_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = verbs.add_parser("report", help="one HTML page from records, and a configuration to serve with")
    report.add_argument("records", nargs="+", help="files written by sweep")
    report.add_argument("--out", default="report.html")
    report.add_argument(
        "--config-out", metavar="FILE", help="the recommended options, for serve --config (default: beside --out)"
    )
    report.add_argument(
        "--users", type=int, metavar="N", help="recommend options for so many users (default: best over all loads)"
    )
    report.add_argument("--title", default="Paceline benchmark")
    report.set_defaults(bench_run=_report)


def _report(args: argparse.Namespace) -> int:
    from paceline.bench.analyse.cells import analyse
    from paceline.bench.analyse.recommend import recommend, serve_options
    from paceline.bench.analyse.report import report_html
    from paceline.bench.run.results import read_records

    records = read_records(args.records)
    Path(args.out).write_text(report_html(records, args.title, args.users), encoding="utf-8")
    advice = recommend(analyse(records), args.users)
    options = serve_options(records, advice)
    config_file = Path(args.config_out) if args.config_out else Path(args.out).with_suffix(".config.json")
    if options is not None:
        config_file.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(advice | {"config": None if options is None else str(config_file)}))
        return 0
    print(f"{args.out}: {advice['summary']}")
    print(f"as one configuration: {advice['reason']}")
    serve = f"to serve with it: paceline serve --config {config_file}"
    print(serve if options is not None else "so no options file was written")
    return 0
