/*! Built from web/source of Penstock. Licences of libraries: vendor/ */
import{a as h,b as l,c as p,f as g,k as y,l as b}from"./chunk-KWULXNSL.js";var f=()=>crypto.getRandomValues(new Uint32Array(3)).reduce((e,t)=>e+t.toString(36),"");function $(e={}){let t=Date.now();return{id:f(),title:"",created:t,updated:t,settings:e,messages:{},leaf:null,firstSent:null}}function M(e,t,s){let n={id:f(),parent:t,created:Date.now(),content:"",...s};return e.messages[n.id]=n,e.leaf=n.id,e.updated=Date.now(),!e.title&&n.role==="user"&&(e.title=N(n.content)),n}var N=e=>{let t=e.trim().split(`
`)[0];return t.length>60?`${t.slice(0,59).trimEnd()}…`:t};function w(e,t=e.leaf){let s=[];for(let n=t;n&&e.messages[n];n=e.messages[n].parent)s.unshift(e.messages[n]);return s}var q=(e,t)=>Object.values(e.messages).filter(s=>s.parent===t.parent).sort((s,n)=>s.created-n.created);function _(e,t){let s=t;for(;;){let n=Object.values(e.messages).filter(o=>o.parent===s.id);if(!n.length)break;s=n.reduce((o,r)=>o.created>r.created?o:r)}e.leaf=s.id}function P(e,t){let s=new Set([t.id]);for(let o=!0;o;){o=!1;for(let r of Object.values(e.messages))s.has(r.parent)&&!s.has(r.id)&&(o=!!s.add(r.id))}for(let o of s)delete e.messages[o];let n=Object.values(e.messages).filter(o=>o.parent===t.parent);n.length?_(e,n.at(-1)):e.leaf=t.parent}function x(e,t){let s=e.messages[e.firstSent];return s?Math.max(0,t.findIndex(({parent:n})=>n===s.parent)):0}function O(e,t=e.leaf){let s=w(e,t),n=x(e,s);return[...e.settings.system?[{role:"system",content:e.settings.system}]:[],...s.slice(n).map(C)]}function C(e){if(e.role==="tool")return{role:"tool",tool_call_id:e.callId,content:e.content};let t={role:e.role,content:e.content};return e.role==="user"&&e.files?.length&&(t.content=[...e.files.map(s=>`${s.name}:

${s.text}`),e.content].join(`

`)),e.reasoning&&(t.reasoning_content=e.reasoning),e.calls?.length&&(t.tool_calls=e.calls.map(s=>({id:s.id,type:"function",function:{name:s.name,arguments:s.arguments}}))),t}function B(e){let t=w(e),s=x(e,t),n=t.slice(s+1).filter(o=>o.role==="user");return n.length?(e.firstSent=n[Math.floor((n.length-1)/2)].id,!0):!1}function K(e){for(let t of Object.values(e.messages)){if(!t.isGrowing)continue;delete t.isGrowing;let s=t.content||t.reasoning?"continue":"retry";t.problem={sentence:"The page was closed before this answer was complete.",way:s}}}function v(e,t){if(!t)return!0;let s=[e.title,...Object.values(e.messages).map(n=>n.content)].join(`
`).toLowerCase();return t.toLowerCase().split(/\s+/).every(n=>s.includes(n))}function D(e){let t=r=>typeof r=="string"?r:"",s=r=>Array.isArray(r)?r:[];if(!e||typeof e.messages!="object"||!e.messages)throw new Error("It has no messages.");let n=$(),o=new Map(Object.keys(e.messages).map(r=>[r,f()]));for(let[r,i]of Object.entries(e.messages)){if(!["user","assistant","tool"].includes(i?.role))throw new Error("A message has an unknown role.");n.messages[o.get(r)]={id:o.get(r),parent:o.get(i.parent)??null,role:i.role,content:t(i.content),isJson:i.isJson===!0,created:Number(i.created)||Date.now(),reasoning:t(i.reasoning)||void 0,callId:t(i.callId)||void 0,name:t(i.name)||void 0,stats:i.stats?T(i.stats):void 0,calls:s(i.calls).map(a=>({id:t(a?.id),name:t(a?.name),arguments:t(a?.arguments)})),files:s(i.files).map(a=>({name:t(a?.name),text:t(a?.text)}))}}n.leaf=o.get(e.leaf)??[...o.values()].at(-1)??null,n.firstSent=o.get(e.firstSent)??null;for(let r of Object.values(n.messages)){let i=new Set;for(let a=r;a;a=n.messages[a.parent]){if(i.has(a.id))throw new Error("Its messages form a cycle.");i.add(a.id)}}return n.title=t(e.title).slice(0,200),n.updated=Number(e.updated)||Date.now(),n}var T=e=>Object.fromEntries(Object.entries(e).filter(([,t])=>Number.isFinite(t)));var S=[{name:"temperature",label:"Temperature",min:0,max:2,step:.05,hint:"0: always the most likely token"},{name:"top_p",label:"Top p",min:.01,max:1,step:.01,hint:"probability mass to sample from"},{name:"top_k",label:"Top k",min:0,max:1e3,step:1,hint:"number of tokens to sample from; 0: all"},{name:"min_p",label:"Min p",min:0,max:1,step:.01,hint:"relative to the most likely token"},{name:"repetition_penalty",label:"Repetition penalty",min:.5,max:2,step:.05,hint:"1: none"},{name:"max_tokens",label:"Max tokens",min:1,step:1,hint:"length limit of an answer"},{name:"seed",label:"Seed",step:1,hint:"makes sampling repeatable"}],A=e=>Object.fromEntries(S.map(({name:t})=>[t,e[t]]).filter(([,t])=>Number.isFinite(t)));function z(e,t,s){let{settings:n}=e,o={model:s,messages:O(e,t),...A(n)};n.thinking&&(o.chat_template_kwargs={enable_thinking:n.thinking==="on"});let r=(n.tools??[]).filter(i=>i.name);if(r.length){o.tools=r.map(({name:a,description:m,parameters:c})=>({type:"function",function:{name:a,description:m,parameters:j(c||'{"type":"object"}',`The schema of ${a}`)}}));let i=n.toolChoice==="required"&&o.messages.at(-1)?.role==="tool";n.toolChoice&&!i&&(o.tool_choice=n.toolChoice)}if(n.schema?.trim()){let i=j(n.schema,"The response schema");o.response_format={type:"json_schema",json_schema:{name:"answer",schema:i,strict:!0}}}return o}function j(e,t){try{return JSON.parse(e)}catch(s){throw new Error(`${t} is not JSON: ${s.message}`)}}function L(e){try{return e.trim()&&JSON.parse(e),""}catch(t){return`Not JSON yet: ${t.message}`}}function U(e){let t={},s=o=>typeof o=="string"?o:"";for(let o of["system","schema","thinking","toolChoice"])s(e?.[o])&&(t[o]=e[o]);for(let{name:o}of S)Number.isFinite(e?.[o])&&(t[o]=e[o]);let n=Array.isArray(e?.tools)?e.tools:[];return t.tools=n.map(o=>Object.fromEntries(["name","description","parameters","code"].map(r=>[r,s(o?.[r])]))),t}var E=e=>`'${e.replaceAll("'","'\\''")}'`,J=(e,t)=>e.replaceAll(`
`,`
${" ".repeat(t)}`);function u(e,t=0){let s="    ".repeat(t+1),n="    ".repeat(t);if(e==null)return"None";if(typeof e=="boolean")return e?"True":"False";if(Array.isArray(e))return e.length?`[
${e.map(r=>s+u(r,t+1)).join(`,
`)},
${n}]`:"[]";if(typeof e!="object")return JSON.stringify(e);let o=Object.entries(e).map(([r,i])=>`${s}${JSON.stringify(r)}: ${u(i,t+1)}`);return o.length?`{
${o.join(`,
`)},
${n}}`:"{}"}function I(e,t){let s=new URL(e,y).href,n=JSON.stringify(t,null,2),o=b()!=="";return{curl:`curl${t.stream?" -N":""} ${s} \\
  -H 'Content-Type: application/json' \\
`+(o?`  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\
`:"")+`  -d ${E(n)}
`,Python:`import json
import os
import urllib.request

body = ${u(t)}
headers = {"Content-Type": "application/json"}
`+(o?`headers["Authorization"] = "Bearer " + os.environ["PENSTOCK_API_KEY"]
`:"")+`request = urllib.request.Request(
    ${JSON.stringify(s)}, json.dumps(body).encode(), headers
)
with urllib.request.urlopen(request) as answer:
    for line in answer:
        print(line.decode(), end="")
`,JavaScript:`const headers = { "Content-Type": "application/json" };
`+(o?`headers.Authorization = "Bearer " + process.env.PENSTOCK_API_KEY;
`:"")+`const body = ${n};
const answer = await fetch(${JSON.stringify(s)}, {
  method: "POST", headers, body: JSON.stringify(body),
});
for await (const piece of answer.body.pipeThrough(new TextDecoderStream()))
  console.log(${J("piece",2)});
`}}function H(e,t){let s=h("copy-dialog"),n=I(e,t),o=l("pre",{tabIndex:0}),r="curl",i=c=>{r=c,o.textContent=n[c];for(let d of a)d.setAttribute("aria-pressed",String(d.textContent===c))},a=Object.keys(n).map(c=>p(c,()=>i(c))),m=p("Copy",c=>g(n[r],c.currentTarget),{class:"primary"});s.replaceChildren(l("h2",{},"Request as code"),l("div",{class:"row"},...a),o,l("div",{class:"row end"},m,p("Close",()=>s.close()))),i("curl"),s.showModal()}export{$ as a,M as b,w as c,q as d,_ as e,P as f,x as g,B as h,K as i,v as j,D as k,S as l,A as m,z as n,L as o,U as p,H as q};
