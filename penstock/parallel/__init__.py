"""One model over several devices: which rank keeps what (`share`), and communication (`ranks`,
`links`).
"""
