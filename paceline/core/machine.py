"""What is known of the machine."""


def cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo, where there is one."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
