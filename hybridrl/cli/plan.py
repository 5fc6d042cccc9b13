"""`hybridrl plan`: a mapping, a switch, memory or schedules, for machines that need not exist."""

from hybridrl.cli.output import print_json, print_table


def plan(args: list[str]) -> None:
    """Plan a mapping, a switch, memory or schedules, for machines that need not be present."""
    if args[:1] == ["schedule"]:
        return _plan_schedule(args[1:])
    if args[:1] == ["auto"]:
        return _plan_auto(args[1:])
    from hybridrl.plan import memory_command

    if {"-h", "--help"} & set(args):
        print(memory_command.USAGE)
        return
    planned = memory_command.run(args)
    print_table(planned.rows(), wraps={0, 1})
    print_json(planned.record())


def _plan_schedule(args: list[str]) -> None:
    """Replay response lengths under every schedule."""
    from rich.console import Console

    from hybridrl.plan import schedule_command

    if {"-h", "--help"} & set(args):
        print(schedule_command.USAGE)
        return
    with Console(stderr=True).status("replaying") as status:
        lines, remarks, record = schedule_command.run(
            args, lambda done, of: status.update(f"replaying: {done} of {of}")
        )
    print_table(lines, remarks)
    print_json(record)


def _plan_auto(args: list[str]) -> None:
    """Search a mapping of a recipe's roles to a cluster."""
    from rich.console import Console

    from hybridrl.plan import mapping_command

    if {"-h", "--help"} & set(args):
        print(mapping_command.USAGE)
        return
    with Console(stderr=True).status("searching") as status:
        report = mapping_command.run(
            args, lambda done, of: status.update(f"replayed {done} of {of} candidates at most")
        )
    print_table(report.table(), report.remarks())
    print_json(report.record())
