-- The fixed window. State: 'window count', where the base of times is the period, so that a window is the high half.
kinds.fixed = {
  size = 6,
  judge = function(key, at, high, low)
    local seen = redis.call('GET', key)
    local count = ARGV[at + 5] + 0
    if seen then
      local window, counted = string.match(seen, '^(%d+) (%d+)$')
      if not window then broken(key) end
      window = window + 0
      if window >= high then high, count = window, count + counted end
    end
    return count <= ARGV[at + 6] + 0, seen, high + 1, 0, string.format('%.0f %.0f', high, count)
  end,
  keep = keep_text,
}
