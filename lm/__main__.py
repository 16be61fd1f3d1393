from lm.cli import main

if __name__ == "__main__":
    main()
