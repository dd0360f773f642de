-- Charges every key or none. ARGV[1] is '1' to charge, '0' to look only; then comes a block for each key.
-- Replies '1' or '0', whether it was charged, and for each key the time that it was judged at and what there was.
local at, charges = 1, ARGV[1] == '1'
local found, told = {}, {}
for i = 1, #KEYS / keys_each do
  local kind, key, base = kinds[ARGV[at + 1]], KEYS[(i - 1) * keys_each + 1], ARGV[at + 2] + 0
  local high, low = time(i, base, at)
  local allowed, seen, expires_high, expires_low, value = kind.judge(key, at, high, low)
  charges = charges and allowed
  local left_ms = math.ceil(((expires_high - high) * base + (expires_low - low)) / 1000) + spare_ms
  found[i] = { kind, key, at, value, left_ms, seen, base, expires_high, expires_low }
  told[i] = time_text(high, low) .. (seen or '')
  at = at + kind.size
end

for i, one in ipairs(found) do
  local kind, key, block, value, left_ms, seen, base, expires_high, expires_low = unpack(one, 1, 9)
  if charges then
    if ARGV[block + 5] ~= '0' then
      kind.keep(key, block, value, left_ms)
      remember(i, base, expires_high, expires_low, left_ms)
    end
  elseif seen and ARGV[1] == '1' and redis.call('PTTL', key) == -1 then
    redis.call('PEXPIRE', key, left_ms) -- somebody took its expiry away: nothing here is for ever
  end
end
return (charges and '1 ' or '0 ') .. table.concat(told, ';') -- of known length: asyncio reads no line above 64 KiB
