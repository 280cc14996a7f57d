"""Mistakes that explore.py must find: for each, what to replace in protocol.py, and by what."""

_WRITE, _WRITTEN = "        yield from write(s, c, number)\n", "        s.written += 1\n"
_SIGN = '        yield "sign", c.slot(number), (s.position, s.call)\n'
_STORE_IN = '        yield "store", "in", number + 1\n'
_READ, _DONE = "        yield from read(s, c, number)\n", "        s.done += 1\n"
_STORE_OUT = '        yield "store", "out", number + 1\n'
_ALL_ARE_IN = 'yield from reached(c, "in", number + 1)'
_ROOT_IS_IN = 'return (yield "load", s.wait_for(c.rank), "in", number + 1) > number'

MISTAKES = {
    "has chunks of its own where the root has one": ("1 if at_once else ", ""),
    "says that it has read a tensor before it has": (
        "is_loaded = s.done > 0 or s.written == 0 or not s.between_devices",
        "is_loaded = True",
    ),
    "lets its tensor be changed while others read it": (
        "if self.between_devices or (self.is_half and not self.is_second):",
        "if self.is_half and not self.is_second:",
    ),
    "has a second half at other chunks": ("        take_numbers(second, c, 2)\n", ""),
    "waits for no rank in a first half": (" or (self.is_half and not self.is_second)", ""),
    "decides alone that it reduces a block": ("halves &= call.halves", "halves &= s.call.halves"),
    "leaves a second half that nobody wants": ("        c.oom_first = c.queue.pop(0).oom_after\n", "        pass\n"),
    "reduces in the slots what goes between devices": (
        "in_parts) and not self.between_devices and not self.is_half",
        "in_parts)",
    ),
    "decides alone that it reads a tensor": ("peers &= call.peers", "peers &= s.call.peers"),
    "writes a slot that others still read": ("number - c.ring + 1", "0"),
    "reads before the others have written": (f"        return ({_ALL_ARE_IN})\n", "        return True\n"),
    "reads parts that are not reduced": ('yield from reached(c, "reduced", number + 1)', _ALL_ARE_IN),
    "reduces before the others have written": (f" and ({_ALL_ARE_IN})", ""),
    "does not wait for the root": (_ROOT_IS_IN, "return True"),
    "compares the calls before all have come": (' or not (yield from reached(c, "in", s.first + 1))', ""),
    "takes the furthest rank's counter for all": ("min(least, value)", "max(least, value)"),
    "says that it has written before it has": (
        _WRITE + _WRITTEN + _SIGN + _STORE_IN,
        _SIGN + _STORE_IN + _WRITE + _WRITTEN,
    ),
    "says that it has come before its signature is there": (_SIGN + _STORE_IN, _STORE_IN + _SIGN),
    "says that it has read before it has": (_READ + _DONE + _STORE_OUT, _STORE_OUT + _READ + _DONE),
    "passes over its own chunks after a mismatch": ("most = max(most, call.chunks)", "most = s.chunks"),
    "leaves later calls where they were": ("later.first += chunks - s.chunks", "pass"),
    "leaves the next call where it was": ("    c.next += chunks - s.chunks\n", ""),
    "plans an exchange by its own call": ("longest = max(longest, call.chunks)", "longest = s.call.chunks"),
    "plans an exchange without taking its numbers": ("    take_numbers(s, c, longest)\n", ""),
    "carries out a call that all have withdrawn": ("    if s.call.signature == OOM_PLACEHOLDER:\n", "    if False:\n"),
    "does not free slots after a mismatch": ('    yield "store", "out", s.first + most\n', ""),
    "takes no chunk for a call without memory": ("    c.next += 1\n", ""),
    "goes on before calls that there was no memory for": ("elif c.oom_first:", "elif False:"),
    "forgets calls without memory behind an operation": ("    c.oom_first = s.oom_after\n", ""),
    "takes no place for a call without memory": (
        "        mpp_shm_out_of_memory(c)\n",
        "        c.outcomes.append(MEMORY)\n",
    ),
    "starts a call without memory where the last one ended": ("        s.written = s.done = 0\n", ""),
}
