"""python -m optpipe_compiler.cli"""

from optpipe_compiler.cli import main

main()
