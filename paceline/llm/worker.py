"""Work that takes longer than an event loop may wait: parsing, tokenizing, preparing and formatting what is large.

One thread does it, one piece at a time: streams share the interpreter with it, and a second one would only slow both.
Another one compiles grammars. That does not need the interpreter, but time: the engine goes before it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.core.niceness import go_behind_others

Result = TypeVar("Result")

# Characters, bytes or entries, at about a microsecond each: less than this is done at once. A choice: at half of it
# more calls pay for a change of thread, at twice of it other streams wait twice as long.
INLINE_SIZE = 2_000
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-worker")
_COMPILER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-compiler", initializer=go_behind_others)


async def in_worker(size: int, work: Callable[[], Result]) -> Result:
    if size <= INLINE_SIZE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


async def in_compiler(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(_COMPILER, work)
