"""Results as one page: what was measured, drawn beside its floor, its goal and what others reach.

    fields   a JSON file, read strictly       projection     eight GPUs from one, by arithmetic
    data     results as plain dataclasses     about_*        from results to sentences, charts and tables
    chart    what a drawing shows             svg, png       the same charts, drawn twice
    page     one HTML file, style its looks   run_report     the command; sections, the order of the page

Measures nothing and asks no server. What a file does not say is not on the page.
"""
