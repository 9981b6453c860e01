"""Results as one page: measurements beside their floor, their goal and others' results.

    data         result files, decoded strictly    charts      lines, bars and ranges, by matplotlib
    findings     what is drawn beside what         page.html   every sentence and table of the page
    run_report   the command, the page, the PNGs

Measures nothing and needs no server. The page has only what the files contain.
"""
