"""`hybridrl completion`: TAB in a shell."""


def completion(args: list[str]) -> None:
    """Print a shell's script, or, after `--`, what the last word may become."""
    from hybridrl.config.completion import complete, script

    if args[:1] == ["--"]:
        print(*complete(args[1:]), sep="\n")
    else:
        print(script(" ".join(args)), end="")
