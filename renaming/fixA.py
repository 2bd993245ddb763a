import re,subprocess
A='num_groups|group_size|group_index|shard_index|world_size|intra_group|inter_group|replica_groups|is_elastic|total_groups|has_one_group|raise_on_all_ranks'
for f in subprocess.run(['git','ls-files','*.py','*.md'],capture_output=True,text=True).stdout.split():
    try: s=o=open(f).read()
    except FileNotFoundError: continue
    s=re.sub(r'(?<!config\.)(?<!\[)\bjob\.('+A+r')\b(?!\s*=)',lambda m:'topology.'+m[1] if m[1] not in('group_size',) or True else m[0],s) if f!='x' else s
    s=re.sub(r'\bs\.job\b','s.topology',s); s=re.sub(r'\bd\.job\b','d.topology',s)
    if s!=o: open(f,'w').write(s); print(f)
