"""`hybridrl new-recipe`: a recipe of the package, copied to be changed."""

import argparse
from pathlib import Path

from hybridrl.cli.output import refuse


def new_recipe(args: list[str]) -> None:
    """Copy a recipe of the package into the working directory."""
    from hybridrl.config import recipe_folder

    parser = argparse.ArgumentParser(
        prog="hybridrl new-recipe", description="Copy a recipe of the package, to change it."
    )
    parser.add_argument("name", metavar="NAME", help="the new folder and its function")
    parser.add_argument("--from", dest="source", required=True, help="a recipe of the package")
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args(args)
    folder = recipe_folder.new_recipe(options.name, options.source, Path.cwd())
    print(f"{folder}; to run it: hybridrl train recipe=./{folder.name}")
