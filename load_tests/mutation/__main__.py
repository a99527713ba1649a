"""Tries every change and says which the mirrored tests notice.

python -m load_tests.mutation                    all: half an hour and more
python -m load_tests.mutation --only admission   those whose file or reason has the word
"""

import argparse
import shlex
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from rich.console import Console
from rich.markup import escape

from load_tests.mutation.mirrors import mirrors
from load_tests.mutation.mutant import ROOT, Mutant
from load_tests.mutation.tables import SETS
from load_tests.mutation.trial import Copy, Trial, copy_of
from load_tests.records import commit, write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=sorted(SETS), help="one set of changes instead of all")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose file or reason has the word")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are tried at the same time")
    parser.add_argument("--prefix", default="", metavar="COMMAND", help="goes before every run of pytest: 'nice -n 19'")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    chosen = [
        (name, mutant)
        for name in ([options.set] if options.set else SETS)
        for mutant in SETS[name]
        if options.only in f"{mutant.file} {mutant.why}"
    ]
    commit()  # kept: the record is of what is tried, whatever is committed meanwhile
    console = Console(highlight=False, soft_wrap=True)
    with ExitStack() as stack, ThreadPoolExecutor(options.jobs) as threads:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(options.jobs):
            copies.put(stack.enter_context(copy_of(ROOT, shlex.split(options.prefix))))

        def tried(named: tuple[str, Mutant]) -> Trial:
            copy, mutant = copies.get(), named[1]
            try:
                trial = copy.tried(mutant, mirrors(mutant.file))
            finally:
                copies.put(copy)
            console.print(
                f"{trial.outcome:10} {mutant.file}: {mutant.why}  [dim]{escape(trial.by)} {trial.seconds:.0f} s[/dim]"
            )
            return trial

        trials = list(threads.map(tried, chosen))
    subject = f"mutation-{options.set}" if options.set else "mutation"
    _report(chosen, trials, console, None if options.no_record else subject)


def _report(chosen: list[tuple[str, Mutant]], trials: list[Trial], console: Console, subject: str | None) -> None:
    """`subject`: of the record; None: nothing is written."""
    scores = {}
    for name in {name for name, _ in chosen}:
        counts = Counter(trial.outcome for (of, _), trial in zip(chosen, trials, strict=True) if of == name)
        scores[name] = dict(counts)
        judged = counts["noticed"] + counts["survived"]
        console.print(f"{name}: {counts['noticed']} of {judged} noticed", dict(counts))
    if subject is not None:
        tried = [
            {"set": name, "file": mutant.file, "why": mutant.why, **trial._asdict()}
            for (name, mutant), trial in zip(chosen, trials, strict=True)
        ]
        console.print(f"record: {write_record(subject, {'scores': scores, 'changes': tried})}")


if __name__ == "__main__":
    main()
