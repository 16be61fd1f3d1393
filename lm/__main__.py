from lm.cli import main
from lm.machine import stop_with_parent

if __name__ == "__main__":
    stop_with_parent()  # as `lm.machine.start_child` starts processes
    main()
