"""Results as one page: measurements beside their floor, their goal and what others reach.

    data         result files, decoded strictly    charts      lines, bars and ranges, by matplotlib
    findings     what is drawn beside what         page.html   every sentence and table of the page
    run_report   the command, the page, the PNGs

Measures nothing and asks no server. What a file does not say is not on the page.
"""
