-- Charges a key, or not. ARGV[1] is '1' to charge, '0' to look only; then comes the block.
-- Replies '1' or '0', whether it was charged, the time that it was judged at, and what there was.
-- PERF: what take_all.lua does, for one key and without its tables.
local key, base = KEYS[1], ARGV[3] + 0
local high, low = time(1, base, 1)
local kind = kinds[ARGV[2]]
local allowed, seen, expires_high, expires_low, value = kind.judge(key, 1, high, low)
if ARGV[1] == '0' then return { ok = '0 ' .. time_text(high, low) .. (seen or '') } end
local left_ms = math.ceil(((expires_high - high) * base + (expires_low - low)) / 1000) + spare_ms
if allowed then
  kind.keep(key, 1, value, left_ms)
  remember(1, base, expires_high, expires_low, left_ms)
  return { ok = '1 ' .. time_text(high, low) .. (seen or '') }
end
if seen and redis.call('PTTL', key) == -1 then redis.call('PEXPIRE', key, left_ms) end -- nothing here is for ever
return { ok = '0 ' .. time_text(high, low) .. (seen or '') }
