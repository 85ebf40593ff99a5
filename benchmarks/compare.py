"""What got slower, or larger, since an earlier run: ratios to the batch gradient, so that machines may differ."""

from collections.abc import Iterable

from .measured import NOT_INSTALLED, Record

NOISE = 0.1  # from run to run ratios move by about this much


def compare(new: Iterable[Record], old: Iterable[Record]) -> list[str]:
    """A line for each contender that got worse or better beyond noise, or fails where it did not; worst first."""
    before = {record.key: record for record in old}
    changes: list[tuple[float, str]] = []
    failures: list[str] = []
    shared = 0
    for record in new:
        was = before.get(record.key)
        if was is None or was.ratio is None or NOT_INSTALLED in (was.measured.error, record.measured.error):
            continue
        shared += 1
        name = ", ".join(record.key)
        if record.ratio is None:
            failures.append(f"FAILS   {name}: {record.measured.error}")
        elif abs(change := record.ratio / was.ratio - 1) > NOISE:
            how = "WORSE " if change > 0 else "better"
            changes.append((change, f"{how}  {name}: {was.ratio:.2f} -> {record.ratio:.2f} ({change:+.0%})"))
    lines = failures + [line for _, line in sorted(changes, reverse=True)]
    return lines + [f"{shared} figures in both runs, {shared - len(lines)} the same within {NOISE:.0%}"]
